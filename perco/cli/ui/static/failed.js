// The failed list: changes whose observer failed too often, with their tracebacks.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { act, age, Confirm, count, Empty, link, Problem, time, useAnswer } from "./parts.js";

export function FailedView({ store, samples, rest, refresh }) {
  const observer = rest[0] ?? "";
  const [limit, setLimit] = useState(100);
  const [answer, error, again, busy] = useAnswer("failed", { observer, limit });
  const [question, setQuestion] = useState(null);
  const [said, setSaid] = useState("");
  const lag = samples.at(-1)?.lag ?? {};
  const here = observer ? (lag[observer]?.failed ?? 0) : Object.values(lag).reduce((sum, each) => sum + each.failed, 0);
  useEffect(() => {
    const timer = setTimeout(again, 1200); // the list is read in the folder, up to a second behind
    return () => clearTimeout(timer);
  }, [here]);
  async function go(name, body) {
    const done = await act(name, body);
    setSaid(name === "replay" ? `${count(done.replayed, "change")} ${done.replayed === 1 ? "is" : "are"} waiting again` : `${count(done.dropped, "change")} dropped`);
    again();
    refresh();
  }
  const dropping = (body, what) => setQuestion({
    text: `Drop ${what}?`,
    detail: "The observer will not run for it. It will run for later changes of the row.",
    verb: "Drop",
    act: () => go("drop", body),
  });
  const replaying = (body, what) => setQuestion({
    text: `Replay ${what}?`,
    detail: "The observer will run again, and attempts count from zero.",
    verb: "Replay",
    act: () => go("replay", body),
  });
  const changes = answer?.changes ?? [];
  return html`
    <form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <label>observer
        <select data-search value=${observer} onChange=${(event) => { location.hash = link("failed", event.target.value ? [event.target.value] : []); }}>
          <option value="">all</option>
          ${store.observers.map((each) => html`<option value=${each.id}>${each.id}</option>`)}
        </select>
      </label>
      <span class="grow">${answer ? observer ? `${count(here, "change")} of ${observer}; ${answer.count} on the failed list in all` : `${count(answer.count, "change")} on the failed list` : busy ? "…" : ""}</span>
      ${observer && changes.length > 0 && html`
        <button type="button" onClick=${() => replaying({ observer, all: true }, `all failed changes of ${observer}`)}>Replay all</button>
        <button type="button" class="danger" onClick=${() => dropping({ observer, all: true }, `all failed changes of ${observer}`)}>Drop all</button>`}
      <button type="button" onClick=${again}>Refresh</button>
    </form>
    <${Problem} text=${error} />
    <p class="said" role="status">${said}</p>
    ${answer && !changes.length && html`<${Empty}>${observer ? `No change of ${observer} is on the failed list.` : "The failed list is empty."}<//>`}
    <ul class="cards">${changes.map((each) => {
      const body = { observer: each.observer, ref: each.ref };
      return html`<li key=${`${each.observer} ${each.table} ${each.ref} ${each.column}`}>
        <div class="row">
          <a href=${link("pipeline", [each.observer])}><b>${each.observer}</b></a>
          <a class="mono" href=${link("data", [each.table], { ref: each.ref })}>${each.table}[${each.key}]</a>
          <span class="dim">.${each.column}</span>
          <span class="grow"></span>
          <span class="dim" title=${time(each.wall)}>${count(each.attempts, "attempt")}, given up ${age(Math.max(Date.now() / 1000 - each.wall, 0))} ago</span>
          <button type="button" onClick=${() => go("replay", body).catch((failure) => setSaid(failure.message))}>Replay</button>
          <button type="button" class="danger" onClick=${() => dropping(body, "this change")}>Drop</button>
        </div>
        <p class="mono bad">${each.error}</p>
        <details><summary>Traceback, and the chain</summary>
          <p class="dim">Caused by the commit at ${each.cause}: ${each.chain.join(" → ")}. The change was committed at ${each.commit_ts}.</p>
          <pre>${each.traceback || "(no traceback was kept)"}</pre>
        </details>
      </li>`;
    })}</ul>
    ${changes.length >= limit && limit < 500 && html`<button type="button" onClick=${() => setLimit(500)}>Show up to 500</button>`}
    <${Confirm} question=${question} done=${() => setQuestion(null)} />`;
}
