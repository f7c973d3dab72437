// Tablets: how large they are, and how busy, by key and time.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { bytes, Empty, Problem, rate, time, useAnswer, whole } from "./parts.js";

export function TabletsView({ store, samples }) {
  const [turn, setTurn] = useState(0);
  const newest = samples.at(-1)?.number ?? 0;
  useEffect(() => setTurn((n) => n + 1), [Math.floor(newest / 5)]);
  const [answer, error] = useAnswer("heat", { turn });
  const sizes = store.tables.flatMap((table) => table.tablets.map((tablet) => ({ table: table.name, ...tablet })));
  const most = Math.max(1, ...sizes.map((each) => each.bytes));
  const live = answer?.tablets ?? [];
  return html`
    <${Problem} text=${error} />
    ${answer && (answer.bands.length ? html`<${HeatMap} answer=${answer} />` : html`<${Empty}>No process has the store open, so nothing is written now.<//>`)}
    <div class="scroll"><table class="grid">
      <caption>Tablets</caption>
      <thead><tr><th>table</th><th>from</th><th class="n">size</th><th></th><th class="n">mutations</th><th class="n">batches</th><th class="n">queued</th><th>process</th></tr></thead>
      <tbody>${sizes.map((each) => {
        const its = live.find((tablet) => tablet.table === each.table && tablet.number === each.number);
        return html`<tr>
          <td>${each.table}</td><td class="mono">${each.start === null ? html`<span class="dim">the beginning</span>` : text(each.start)}</td>
          <td class="n">${bytes(each.bytes)}</td>
          <td class="meter"><meter min="0" max=${most} value=${each.bytes} aria-label=${`size of ${each.table}`}></meter></td>
          <td class="n">${its ? whole(its.mutations) : ""}</td><td class="n">${its ? whole(its.batches) : ""}</td><td class="n">${its ? its.queued : ""}</td>
          <td class="dim">${its ? (its.server ? `server ${its.server}, ${its.process}` : `owner, ${its.process}`) : ""}</td>
        </tr>`;
      })}</tbody>
    </table></div>`;
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// Lines are tablets in the order of tables and keys; columns are moments; the colour is mutations a second.
function HeatMap({ answer }) {
  const canvas = useRef(null);
  const [at, setAt] = useState(null);
  const { times, bands } = answer;
  const line = Math.max(3, Math.min(22, Math.floor(420 / bands.length)));
  const most = Math.max(1, ...bands.flatMap((band) => band.rates));
  useEffect(() => {
    const box = canvas.current;
    const scale = window.devicePixelRatio || 1;
    const w = box.clientWidth;
    const h = line * bands.length;
    box.width = w * scale;
    box.height = h * scale;
    const paint = box.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const [cold, warm, hot] = ["--cold", "--warm", "--hot"].map((name) => rgb(style.getPropertyValue(name)));
    const step = w / Math.max(times.length, 30);
    bands.forEach((band, y) => band.rates.forEach((value, x) => {
      const share = Math.log1p(value) / Math.log1p(most);
      paint.fillStyle = share < 0.5 ? mixed(cold, warm, share * 2) : mixed(warm, hot, share * 2 - 1);
      paint.fillRect(w - (times.length - x) * step, y * line, step + 0.5, line - (line > 6 ? 1 : 0));
    }));
  });
  function pointed(event) {
    const box = canvas.current.getBoundingClientRect();
    const step = box.width / Math.max(times.length, 30);
    const x = times.length - 1 - Math.floor((box.right - event.clientX) / step);
    const y = Math.floor((event.clientY - box.top) / line);
    setAt(bands[y] && x >= 0 && x < times.length ? [bands[y], x] : null);
  }
  const busiest = bands.map((band) => [band, band.rates.at(-1) ?? 0]).sort((a, b) => b[1] - a[1])[0];
  const told = at
    ? `${named(at[0])}: ${rate(at[0].rates[at[1]])} mutations a second at ${time(times[at[1]])}`
    : times.length ? `busiest now: ${named(busiest[0])}, ${rate(busiest[1])} mutations a second` : "the first column comes within ten seconds";
  return html`<figure class="heat">
    <figcaption><b>Writes by key and time</b> <span class="dim">${told}</span></figcaption>
    <div class="map">
      <div class="names" aria-hidden="true">${bands.map((band, n) => html`<span style=${{ height: `${line}px` }}>${n === 0 || bands[n - 1].table !== band.table || line > 12 ? named(band) : ""}</span>`)}</div>
      <canvas ref=${canvas} style=${{ height: `${line * bands.length}px` }} onMouseMove=${pointed} onMouseLeave=${() => setAt(null)} role="img" aria-label=${`mutations a second by tablet and time; ${told}`}></canvas>
    </div>
  </figure>`;
}

const named = (band) => `${band.table}${band.start ? ` from ${band.start}` : ""}`;
const rgb = (text) => text.trim().match(/\w\w/g).map((part) => Number.parseInt(part, 16));
const mixed = (from, to, share) => `rgb(${from.map((part, at) => Math.round(part + (to[at] - part) * share)).join(",")})`;
