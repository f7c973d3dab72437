// The pipeline: columns, the observers of each, and what these write; how far each observer lags behind.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { act, age, Chart, Confirm, count, Empty, Fact, link, Problem, rate, whole } from "./parts.js";

const TREND_S = 10; // over how many seconds rates are taken

// How a number changes a second, from the samples: of an observer's lag.
function perSecond(samples, id, field) {
  const last = samples.at(-1);
  if (!last?.lag[id]) return null;
  const first = samples.findLast((each) => each.lag[id] && each.owner === last.owner && last.at - each.at >= TREND_S)
    ?? samples.find((each) => each.lag[id] && each.owner === last.owner);
  if (!first || first === last) return null;
  const change = last.lag[id][field] - first.lag[id][field];
  return change / (last.at - first.at);
}

function state(observer, lag, open) {
  if (observer.paused) return ["paused", "paused"];
  if (observer.tripped) return ["bad", "tripped"];
  if (lag?.waiting && !lag.workers) return ["bad", "no worker"];
  if (lag?.failed) return ["bad", "failed changes"];
  if (lag?.failing) return ["warn", "failing"];
  if (!open) return ["paused", "not running"];
  if (!observer.ready) return ["warn", "backfill"];
  if (lag?.waiting) return ["busy", "working"];
  return ["ok", "idle"];
}

export function PipelineView({ store, samples, rest, refresh }) {
  const lag = samples.at(-1)?.lag ?? {};
  const chosen = store.observers.find((each) => each.id === rest[0]);
  if (!store.observers.length)
    return html`<${Empty}>No observers are registered in this store. Open it with a program that declares some, and they appear here.<//>`;
  return html`
    <div class=${chosen ? "with-panel" : ""}>
      <div class="wide">
        <${Graph} observers=${store.observers} lag=${lag} samples=${samples} chosen=${chosen?.id} />
        <${Table} observers=${store.observers} lag=${lag} samples=${samples} chosen=${chosen?.id} />
      </div>
      ${chosen && html`<${Panel} key=${chosen.id} observer=${chosen} lag=${lag[chosen.id]} samples=${samples} refresh=${refresh} />`}
    </div>`;
}

// ---------------------------------------------------------------- the drawing

function laidOut(observers) {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "LR", nodesep: 22, ranksep: 62, marginx: 12, marginy: 16 });
  graph.setDefaultEdgeLabel(() => ({}));
  const column = (table, name) => {
    const id = `c ${table}.${name}`;
    if (!graph.hasNode(id)) graph.setNode(id, { kind: "column", text: `${table}.${name}`, table, width: width(`${table}.${name}`), height: 30 });
    return id;
  };
  for (const each of observers) {
    const id = `o ${each.id}`;
    graph.setNode(id, { kind: "observer", observer: each, text: each.id, width: Math.max(width(each.id) + 22, 176), height: 46 });
    graph.setEdge(column(each.table, each.column), id, { of: each.id, way: "in" }, "in");
    for (const [table, name] of each.outputs) graph.setEdge(id, column(table, name), { of: each.id, way: "out" }, `${table}.${name}`);
  }
  dagre.layout(graph);
  return graph;
}

const width = (text) => Math.max(64, text.length * 7.3 + 24);

function curve(points) {
  const [first, ...more] = points;
  let path = `M${first.x},${first.y}`;
  for (let at = 0; at < more.length; at += 1) {
    const from = points[at];
    const to = more[at];
    const middle = (from.x + to.x) / 2;
    path += ` C${middle},${from.y} ${middle},${to.y} ${to.x},${to.y}`;
  }
  return path;
}

function Graph({ observers, lag, samples, chosen }) {
  const shape = JSON.stringify(observers.map((each) => [each.id, each.table, each.column, each.outputs]));
  const graph = useMemo(() => laidOut(observers), [shape]);
  const byId = Object.fromEntries(observers.map((each) => [each.id, each]));
  const { width: w, height: h } = graph.graph();
  const open = samples.at(-1)?.owner > 0;
  useEffect(() => {
    document.querySelector(".graph .chosen")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [chosen]);
  return html`<div class="graph" tabindex="-1">
    <svg style=${{ width: "100%", maxWidth: `${w}px`, minWidth: `${Math.min(w, 0.8 * w)}px` }} viewBox=${`0 0 ${w} ${h}`} role="group" aria-label="The pipeline: columns, and the observers between them">
      <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" /></marker></defs>
      ${graph.edges().map((name) => {
        const edge = graph.edge(name);
        const its = lag[edge.of];
        const runs = perSecond(samples, edge.of, "runs");
        const text = edge.way === "in" ? (its?.waiting ? whole(its.waiting) : "") : runs ? `${rate(runs)}/s` : "";
        const busy = edge.way === "in" ? its?.waiting > 0 : runs > 0;
        const middle = edge.points[Math.floor(edge.points.length / 2)];
        return html`<g class=${`edge ${busy ? "busy" : ""}`}>
          <path d=${curve(edge.points)} marker-end="url(#tip)" />
          ${text && html`<text x=${middle.x} y=${middle.y - 5} text-anchor="middle">${text}</text>`}
        </g>`;
      })}
      ${graph.nodes().map((name) => {
        const node = graph.node(name);
        const at = `translate(${node.x - node.width / 2},${node.y - node.height / 2})`;
        if (node.kind === "column")
          return html`<g class="column" transform=${at}><rect width=${node.width} height=${node.height} rx="4" /><text x=${node.width / 2} y="19" text-anchor="middle">${node.text}</text></g>`;
        const observer = byId[node.observer.id];
        const its = lag[observer.id];
        const [tone, word] = state(observer, its, open);
        const told = its?.waiting ? `${word} · ${age(its.oldest_s)}` : word;
        return html`<a href=${link("pipeline", [observer.id])} class=${`observer ${tone} ${observer.id === chosen ? "chosen" : ""}`}
            aria-label=${`observer ${observer.id}: ${word}, ${count(its?.waiting ?? 0, "change")} waiting`}>
          <g transform=${at}>
            <rect width=${node.width} height=${node.height} rx="23" />
            <circle cx="18" cy="16" r="4.5" />
            <text x="29" y="20" class="name">${observer.id}</text>
            <text x="29" y="36" class="small">${told}</text>
          </g>
        </a>`;
      })}
    </svg>
  </div>`;
}

// ---------------------------------------------------------------- the table

function Table({ observers, lag, samples, chosen }) {
  const open = samples.at(-1)?.owner > 0;
  return html`<div class="scroll"><table class="grid">
    <caption>Observers</caption>
    <thead><tr>
      <th>observer</th><th>state</th><th class="n">waiting</th><th class="n" title="by how much waiting grows or shrinks">a second</th><th class="n">oldest</th><th class="n">runs a second</th>
      <th class="n">failing</th><th class="n">failed</th><th class="n">workers</th>
    </tr></thead>
    <tbody>${observers.map((each) => {
      const its = lag[each.id];
      const [tone, word] = state(each, its, open);
      const trend = perSecond(samples, each.id, "waiting");
      const runs = perSecond(samples, each.id, "runs");
      return html`<tr class=${each.id === chosen ? "chosen" : ""}>
        <td class="whole"><a href=${link("pipeline", [each.id])}>${each.id}</a></td>
        <td class="whole"><span class=${`dot ${tone}`}></span>${word}</td>
        <td class="n">${its ? whole(its.waiting) : ""}</td>
        <td class="n">${trend === null ? "" : `${trend > 0 ? "+" : trend < 0 ? "−" : ""}${rate(Math.abs(trend))}`}</td>
        <td class="n">${its?.waiting ? age(its.oldest_s) : ""}</td>
        <td class="n">${runs === null || Number.isNaN(runs) ? "" : rate(Math.max(runs, 0))}</td>
        <td class=${`n ${its?.failing ? "warn" : ""}`}>${its ? whole(its.failing) : ""}</td>
        <td class="n">${its?.failed ? html`<a class="bad" href=${link("failed", [each.id])}>${whole(its.failed)}</a>` : its ? "0" : ""}</td>
        <td class=${`n ${its?.waiting && !its.workers && !each.paused && open ? "bad" : ""}`}>${its ? its.workers : ""}</td>
      </tr>`;
    })}</tbody>
  </table></div>`;
}

// ---------------------------------------------------------------- one observer

function Panel({ observer, lag, samples, refresh }) {
  const [question, setQuestion] = useState(null);
  const [error, setError] = useState("");
  const heading = useRef(null);
  useEffect(() => {
    const from = document.activeElement;
    heading.current.focus({ preventScroll: true });
    return () => from?.isConnected && from.focus({ preventScroll: true });
  }, []);
  const [tone, word] = state(observer, lag, samples.at(-1)?.owner > 0);
  const seen = samples.filter((each) => each.lag[observer.id]);
  const times = seen.map((each) => each.at);
  const values = (field) => seen.map((each) => each.lag[observer.id][field]);
  async function go(name, body) {
    setError("");
    try {
      await act(name, body);
      refresh();
    } catch (failure) {
      setError(failure.message);
    }
  }
  const body = { observer: observer.id };
  const failed = lag?.failed ?? 0;
  return html`<aside class="panel" aria-label=${`observer ${observer.id}`}>
    <div class="head">
      <h2 ref=${heading} tabindex="-1">${observer.id}</h2>
      <a class="quiet" href=${link("pipeline")} data-close aria-label="Close" title="close (Esc)">×</a>
    </div>
    <p><span class=${`dot ${tone}`}></span>${word}</p>
    ${observer.tripped && html`<${Problem} text=${`all of its recent runs failed: ${observer.tripped}`} />`}
    <dl class="facts">
      <${Fact} name="observes">${observer.table}.${observer.column}<//>
      <${Fact} name="writes">${observer.outputs.map(([table, name]) => html`<div>${table}.${name}</div>`)}<//>
      <${Fact} name="version">${observer.version}<//>
      ${Object.entries(observer.limits).map(([name, value]) => html`<${Fact} name=${name}>${String(value)}<//>`)}
      ${lag && html`
        <${Fact} name="waiting">${whole(lag.waiting)}${lag.counted_s >= 5 ? ` (counted ${age(lag.counted_s)} ago)` : ""}<//>
        <${Fact} name="oldest">${lag.waiting ? age(lag.oldest_s) : "–"}<//>
        <${Fact} name="failing">${whole(lag.failing)}${lag.failing ? `, up to ${count(lag.attempts, "attempt")}` : ""}<//>
        <${Fact} name="failed">${whole(failed)}<//>
        <${Fact} name="workers">${lag.workers}<//>`}
    </dl>
    <div class="buttons">
      ${observer.paused
        ? html`<button type="button" onClick=${() => go("resume", body)}>Resume</button>`
        : html`<button type="button" onClick=${() => setQuestion({
            text: `Pause ${observer.id}?`,
            detail: "No program runs it until it is resumed. Its changes keep waiting.",
            verb: "Pause",
            act: () => go("pause", body),
          })}>Pause</button>`}
      ${failed > 0 && html`<a class="button" href=${link("failed", [observer.id])}>Show failed</a>`}
    </div>
    <${Problem} text=${error} />
    ${times.length > 1 ? html`
      <${Chart} label="waiting changes over time" times=${times} series=${[{ name: "waiting", values: values("waiting") }]} />
      <${Chart} label="age of the oldest change over time" times=${times} series=${[{ name: "age of the oldest", values: values("oldest_s"), unit: "s" }]} />`
    : null}
    <${Confirm} question=${question} done=${() => setQuestion(null)} />
  </aside>`;
}
