// Rows: a table from a key on, as of a moment; a row with its versions, and what it came from; differences.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { Empty, kept, link, Problem, time, useAnswer, whole } from "./parts.js";

export function DataView({ store, rest, query }) {
  const table = store.tables.find((each) => each.name === rest[0]);
  if (!store.tables.length) return html`<${Empty}>This store has no tables yet.<//>`;
  return html`
    <div class="tables" role="navigation" aria-label="Tables">
      ${store.tables.map((each) => html`<a href=${link("data", [each.name])} aria-current=${each === table ? "page" : undefined}>${each.name}</a>`)}
    </div>
    ${!table
      ? html`<${Tables} tables=${store.tables} />`
      : query.ref !== undefined || query.key !== undefined
        ? html`<${OneRow} key=${`${table.name} ${query.ref} ${query.key} ${query.at}`} table=${table} query=${query} />`
        : rest[1] === "diff"
          ? html`<${Differences} table=${table} query=${query} />`
          : html`<${Rows} key=${table.name} table=${table} query=${query} />`}`;
}

function Tables({ tables }) {
  return html`<div class="scroll"><table class="grid">
    <caption>Tables</caption>
    <thead><tr><th>table</th><th>key</th><th>columns</th><th>kept</th></tr></thead>
    <tbody>${tables.map((each) => html`<tr>
      <td><a href=${link("data", [each.name])}>${each.name}</a></td>
      <td class="dim">${each.key}</td>
      <td>${each.columns.map((column, at) => html`${at ? ", " : ""}<span>${column.name}</span> <span class="dim">${column.codec}</span>`)}</td>
      <td class="dim whole">${kept(each.keep)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

const MOMENT = "5m, 2h (ago); 2026-03-01T12:00; a timestamp; empty: now";

function Rows({ table, query }) {
  const { prefix = "", start = "", after, at = "" } = query;
  const [form, setForm] = useState({ prefix, start, at });
  useEffect(() => setForm({ prefix, start, at }), [prefix, start, at]);
  const [answer, error, again, busy] = useAnswer("rows", { table: table.name, prefix, start, after, at, limit: 50 });
  const field = (name, title, placeholder) => html`<label>${title}
    <input name=${name} value=${form[name]} placeholder=${placeholder} autocomplete="off" spellcheck=${false}
      title=${placeholder} data-search=${name === "prefix" ? "" : undefined} onInput=${(event) => setForm({ ...form, [name]: event.target.value })} />
  </label>`;
  function go(event) {
    event.preventDefault();
    const next = link("data", [table.name], form);
    if (next === location.hash) again();
    else location.hash = next;
  }
  return html`
    <form class="bar" onSubmit=${go}>
      ${field("prefix", "prefix", table.key.startsWith("(") || table.key.startsWith("tuple") ? '["first part"]' : "of the key")}
      ${field("start", "from", "a key")}
      ${field("at", "as of", MOMENT)}
      <button type="submit">Show</button>
      <a class="button" href=${link("data", [table.name, "diff"])}>Differences</a>
    </form>
    <${Problem} text=${error} />
    ${answer && html`
      <div class="scroll"><table class="grid mono">
        <caption>Rows of ${table.name}, as of timestamp ${answer.ts}</caption>
        <thead><tr><th>key</th>${answer.columns.map((name) => html`<th>${name}</th>`)}</tr></thead>
        <tbody>${answer.rows.map((row) => html`<tr key=${row.ref}>
          <td><a href=${link("data", [table.name], { ref: row.ref, at })}>${row.key || "(empty)"}</a></td>
          ${row.values.map((value) => html`<td class=${value === null ? "none" : ""}>${value ?? ""}</td>`)}
        </tr>`)}</tbody>
      </table></div>
      ${!answer.rows.length && html`<${Empty}>No rows here.<//>`}
      <div class="buttons">
        ${after !== undefined && html`<a class="button" href=${link("data", [table.name], { prefix, start, at })}>First page</a>`}
        ${answer.more && html`<a class="button" href=${link("data", [table.name], { prefix, start, at, after: answer.rows.at(-1).ref })}>Next page</a>`}
      </div>`}
    ${!answer && busy && html`<p class="empty">Loading …</p>`}`;
}

// ---------------------------------------------------------------- a row

function OneRow({ table, query }) {
  const { ref, key, at = "" } = query;
  const [answer, error, , busy] = useAnswer("row", { table: table.name, ref, key, at });
  return html`
    <${Problem} text=${error} />
    ${!answer && busy && html`<p class="empty">Loading …</p>`}
    ${answer && html`
      <p class="back"><a href=${link("data", [table.name], { at })}>Rows of ${table.name}</a>${at && html` · as of ${at} · <a href=${link("data", [table.name], { ref: answer.ref })}>show now</a>`}</p>
      <h2 class="mono key">${table.name}[${answer.key}]</h2>
      ${!answer.columns.length && html`<${Empty}>This row was never written, or its versions are gone.<//>`}
      ${answer.columns.map((column) => html`<section class="versions" aria-label=${column.name} key=${column.name}>
        <h3>${column.name} <span class="dim">${column.codec}</span></h3>
        <ol>${column.versions.map((each, n) => html`<li class=${n ? "old" : ""}>
          <div class="when"><span title="commit timestamp">${each.commit_ts}</span><span class="dim">${time(each.at)}</span></div>
          ${each.deleted ? html`<p class="dim">(deleted)</p>` : html`<pre>${each.value}</pre>`}
        </li>`)}</ol>
      </section>`)}
      <${Causes} table=${table.name} of=${answer.ref} />`}`;
}

function Causes({ table, of }) {
  const [wanted, setWanted] = useState(false);
  const [answer, error, , busy] = useAnswer("causes", { table, ref: of }, wanted);
  return html`<section aria-label="Causes">
    <h3>Causes and effects</h3>
    ${!wanted && html`<p><button type="button" onClick=${() => setWanted(true)}>Find causes</button> <span class="dim">scans the whole store, which is slow if it is large</span></p>`}
    ${busy && html`<p class="empty">Reading …</p>`}
    <${Problem} text=${error} />
    ${answer && (answer.trees.length
      ? html`<ul class="tree">${answer.trees.map((tree) => html`<${Node} tree=${tree} />`)}</ul>`
      : html`<${Empty}>The row was never written.<//>`)}
  </section>`;
}

const named = (cell) => html`<a class="mono" href=${link("data", [cell.table], { ref: cell.ref })}>${cell.table}[${cell.key}]</a><span class="dim mono">.${cell.column}</span>`;

function Node({ tree }) {
  return html`<li class=${tree.asked ? "asked" : ""}>
    <div>
      <span class="ts">${tree.commit_ts}</span>
      ${tree.observer === null ? html`<b>a program's transaction</b>` : html`<b>${tree.observer}</b> on ${tree.signal ? "signal " : ""}${named(tree.on)}`}
      ${tree.attempts > 1 && html`<span class="warn"> attempt ${tree.attempts}</span>`}
      ${tree.also > 0 && html`<span class="dim"> and ${tree.also} more in one transaction</span>`}
      ${tree.through.length > 0 && html`<span class="dim"> through ${tree.through.join(" → ")}</span>`}
      ${tree.unsure && html`<span class="warn"> or a run for a signal whose cause is no longer kept</span>`}
      ${tree.asked && html`<span class="tag">wrote this row</span>`}
    </div>
    <ul>
      ${tree.writes.map((cell) => html`<li class="cell">${named(cell)}</li>`)}
      ${tree.more_writes > 0 && html`<li class="dim">and ${whole(tree.more_writes)} more cells</li>`}
      ${tree.runs.map((run) => html`<${Node} tree=${run} />`)}
      ${tree.more_runs > 0 && html`<li class="dim">and ${whole(tree.more_runs)} more runs; perco trace --json has all</li>`}
    </ul>
  </li>`;
}

// ---------------------------------------------------------------- differences

function Differences({ table, query }) {
  const { from = "", to = "" } = query;
  const [form, setForm] = useState({ from: from || "10m", to });
  useEffect(() => setForm({ from: from || "10m", to }), [from, to, table.name]);
  const [answer, error, again, busy] = useAnswer("diff", { table: table.name, from, to }, from !== "");
  function go(event) {
    event.preventDefault();
    const next = link("data", [table.name, "diff"], form);
    if (next === location.hash) again();
    else location.hash = next;
  }
  return html`
    <form class="bar" onSubmit=${go}>
      <label>from<input data-search value=${form.from} placeholder=${MOMENT} onInput=${(event) => setForm({ ...form, from: event.target.value })} /></label>
      <label>to<input value=${form.to} placeholder=${MOMENT} onInput=${(event) => setForm({ ...form, to: event.target.value })} /></label>
      <button type="submit">Compare</button>
      <a class="button" href=${link("data", [table.name])}>Rows</a>
    </form>
    <${Problem} text=${error} />
    ${busy && html`<p class="empty">Reading the table twice …</p>`}
    ${!from && html`<${Empty}>Two moments of ${table.name}, row by row. The table keeps its old versions for ${kept(table.keep)}.<//>`}
    ${answer && html`
      <div class="scroll"><table class="grid mono">
        <caption>How ${table.name} differs between timestamps ${answer.from} and ${answer.to}</caption>
        <thead><tr><th>key</th><th>column</th><th>before</th><th>after</th></tr></thead>
        <tbody>${answer.rows.flatMap((row) => row.cells.map((cell, n) => html`<tr>
          <td>${n ? "" : html`<a href=${link("data", [table.name], { ref: row.ref })}>${row.key}</a>`}</td>
          <td>${cell.column}</td>
          <td class=${cell.before === null ? "none" : "before"}>${cell.before ?? ""}</td>
          <td class=${cell.after === null ? "none" : "after"}>${cell.after ?? ""}</td>
        </tr>`))}</tbody>
      </table></div>
      ${!answer.rows.length && html`<${Empty}>No difference.<//>`}
      ${answer.more && html`<p class="dim">There are more differences; perco diff prints all.</p>`}`}`;
}
