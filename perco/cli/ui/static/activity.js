// Who uses the store, what holds history back (open transactions, pins), and where transactions conflict.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { act, age, Chart, Confirm, Empty, Fact, kept, link, Problem, useAnswer, whole } from "./parts.js";

const KINDS = {
  transaction: "an open transaction or snapshot",
  snapshot: "an open snapshot of the past",
  pin: "a pin",
  retention: "the retention period (perco.Keep)",
};

export function ActivityView({ store, samples, refresh }) {
  const [question, setQuestion] = useState(null);
  const [turn, setTurn] = useState(0);
  const newest = samples.at(-1)?.number ?? 0;
  useEffect(() => setTurn((n) => n + 1), [Math.floor(newest / 2)]);
  const [uses, error] = useAnswer("uses", { turn });
  const rates = risen(samples);
  const { watermark, pins } = store.history;
  const holder = watermark.holder;
  return html`
    <dl class="facts wide-facts">
      <${Fact} name="readable from">${watermark.ts ? html`timestamp ${watermark.ts}${watermark.age_s === null ? "" : `, ${age(watermark.age_s)} ago`}` : "the beginning"}<//>
      ${holder?.ts > 0 && html`<${Fact} name="held back by" tone=${holder.kind !== "retention" && holder.age_s > 3600 ? "warn" : ""}>
        ${KINDS[holder.kind]}${holder.kind === "pin" ? ` ${holder.name}` : ""}, timestamp ${holder.ts}${holder.age_s === null ? "" : `, begun ${age(holder.age_s)} ago`}
        <span class="dim"> (as the vacuum saw it ${age(holder.since_s)} ago)</span><//>`}
      ${holder?.oldest_open && samples.at(-1)?.owner > 0 && html`<${Fact} name="oldest open">timestamp ${holder.oldest_open.ts}${holder.oldest_open.age_s === null ? "" : `, ${age(holder.oldest_open.age_s)} ago`}<//>`}
    </dl>
    <${Problem} text=${error} />
    <${Processes} uses=${uses} />
    ${rates.times.length > 1 && html`<div class="card"><h3>Transactions a second</h3>
      <${Chart} label="committed transactions and conflicts a second, over time" times=${rates.times} series=${[
        { name: "committed", values: rates.commits, unit: "/s" }, { name: "conflicts", values: rates.conflicts, unit: "/s" }]} /></div>`}
    <${Contended} uses=${uses} />
    <div class="scroll"><table class="grid">
      <caption>Pins</caption>
      <thead><tr><th>pin</th><th>owner</th><th class="n">timestamp</th><th class="n">made</th><th class="n">lease</th><th></th></tr></thead>
      <tbody>${pins.map((pin) => html`<tr>
        <td>${pin.name}</td><td class="dim">${pin.owner}</td><td class="n">${pin.ts}</td><td class="n">${age(pin.age_s)} ago</td>
        <td class=${`n ${pin.lease_left_s ? "" : "warn"}`}>${pin.lease_left_s ? `${age(pin.lease_left_s)} left` : "has expired"}</td>
        <td class="n"><button type="button" class="danger" onClick=${() => setQuestion({
          text: `Drop the pin ${pin.name}?`,
          detail: "Versions that only this pin keeps are removed by the vacuum. Snapshots at its timestamp may fail.",
          verb: "Drop",
          act: async () => { await act("drop-pin", { pin: pin.name }); refresh(); },
        })}>Drop</button></td>
      </tr>`)}</tbody>
    </table></div>
    ${!pins.length && html`<${Empty}>No pins.<//>`}
    <div class="scroll"><table class="grid">
      <caption>How far back each table can be read</caption>
      <thead><tr><th>table</th><th class="n">since timestamp</th><th class="n">age</th><th class="n">keeps</th></tr></thead>
      <tbody>${store.tables.map((table) => html`<tr>
        <td>${table.name}</td>
        <td class="n">${table.readable_since.ts || "the beginning"}</td>
        <td class="n">${table.readable_since.age_s === null ? "" : age(table.readable_since.age_s)}</td>
        <td class="n">${kept(table.keep)}</td>
      </tr>`)}</tbody>
    </table></div>
    <${Confirm} question=${question} done=${() => setQuestion(null)} />`;
}

// How the counts of the samples rise a second.
function risen(samples) {
  const times = [];
  const commits = [];
  const conflicts = [];
  for (let at = 1; at < samples.length; at += 1) {
    const [from, to] = [samples[at - 1], samples[at]];
    const seconds = Math.max(to.at - from.at, 0.001);
    times.push(to.at);
    commits.push((to.commits - from.commits) / seconds);
    conflicts.push((to.conflicts - from.conflicts) / seconds);
  }
  return { times, commits, conflicts };
}

function Processes({ uses }) {
  if (!uses) return null;
  if (!uses.processes.length) return html`<${Empty}>No process has the store open.<//>`;
  const open = (number, oldest, oldestAge) => (number ? html`${whole(number)}, the oldest ${oldestAge === null ? `at ${oldest}` : `${age(oldestAge)} old`}` : "0");
  return html`<div class="scroll"><table class="grid">
    <caption>Processes that use the store</caption>
    <thead><tr><th>process</th><th>program</th><th>runs</th><th class="n">commits</th><th class="n">conflicts</th><th class="n" title="how often a transaction has waited for another one's lock">waits for locks</th>
      <th class="n">open transactions</th><th class="n" title="open snapshots of an earlier moment, which hold back the vacuum">snapshots of the past</th></tr></thead>
    <tbody>${uses.processes.map((each) => html`<tr>
      <td class="whole">${each.pid}${each.role === "owner" ? " (owner)" : ""}</td><td class="mono">${each.program}</td>
      <td>${each.observers.map((id, at) => html`${at ? ", " : ""}<a href=${link("pipeline", [id])}>${id}</a>`)}</td>
      <td class="n">${whole(each.commits)}</td><td class="n">${whole(each.conflicts)}</td><td class="n">${whole(each.lock_waits)}</td>
      <td class=${`n ${each.oldest_s > 3600 ? "warn" : ""}`}>${open(each.open, each.oldest, each.oldest_s)}</td>
      <td class="n">${open(each.pasts, each.oldest_past, each.oldest_past_s)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Contended({ uses }) {
  if (!uses?.contended.length) return null;
  return html`<div class="scroll"><table class="grid">
    <caption>Cells on which transactions conflict most</caption>
    <thead><tr><th>row</th><th>column</th><th class="n">conflicts</th></tr></thead>
    <tbody>${uses.contended.map((each) => html`<tr>
      <td><a class="mono" href=${link("data", [each.table], { ref: each.ref })}>${each.table}[${each.key}]</a></td>
      <td class="mono">${each.column}</td><td class="n">${whole(each.conflicts)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}
