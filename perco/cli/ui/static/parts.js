// Shared by all views: questions to the server, ways to write numbers, small parts.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

// ---------------------------------------------------------------- questions

export class Refused extends Error {
  constructor(message, kind, status) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

async function answered(response) {
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({})); // of a proxy, perhaps
  throw new Refused(body.error ?? `the server answered ${response.status}`, body.kind ?? "", response.status);
}

export async function ask(name, parameters = {}, signal = undefined) {
  const url = new URL(`api/${name}`, document.baseURI);
  for (const [key, value] of Object.entries(parameters))
    if (value !== null && value !== undefined) url.searchParams.set(key, value);
  return answered(await fetch(url, { signal }));
}

export async function act(name, body) {
  const url = new URL(`api/do/${name}`, document.baseURI);
  const headers = { "content-type": "application/json" };
  return answered(await fetch(url, { method: "POST", headers, body: JSON.stringify(body) }));
}

// Asks when the component appears, and when what it depends on changes. Returns [answer, error, ask again, busy].
export function useAnswer(name, parameters, when = true) {
  const [state, setState] = useState({ answer: null, error: "", busy: false });
  const [turn, setTurn] = useState(0);
  const wanted = JSON.stringify(parameters);
  useEffect(() => {
    if (!when) {
      setState({ answer: null, error: "", busy: false });
      return undefined;
    }
    const control = new AbortController();
    setState((before) => ({ ...before, busy: true }));
    ask(name, parameters, control.signal)
      .then((answer) => setState({ answer, error: "", busy: false }))
      .catch((error) => {
        if (error.name !== "AbortError") setState({ answer: null, error: error.message, busy: false });
      });
    return () => control.abort();
  }, [name, wanted, turn, when]);
  return [state.answer, state.error, () => setTurn((n) => n + 1), state.busy];
}

// ---------------------------------------------------------------- addresses

// #/data/docs?ref=61 -> { view: "data", rest: ["docs"], query: { ref: "61" } }
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decoded);
  return { view: view || "pipeline", rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody has typed a "%"
  }
}

export function link(view, rest = [], query = {}) {
  const path = [view, ...rest].map(encodeURIComponent).join("/");
  const rows = ["ref", "after"]; // the row with the empty key has an empty name
  const given = Object.entries(query).filter(([name, value]) => value !== null && value !== undefined && (value !== "" || rows.includes(name)));
  return `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

// ---------------------------------------------------------------- words

export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function whole(number) {
  return Math.round(number).toLocaleString("en-US").replaceAll(",", "\u202f");
}

export function rate(number) {
  if (number === 0) return "0";
  return number >= 100 ? whole(number) : number >= 10 ? number.toFixed(0) : number.toFixed(1);
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${seconds.toFixed(0)} s`;
}

// How long a table keeps old versions.
export function kept(keep) {
  return `${age(keep.seconds)}${keep.versions > 1 ? `, ${keep.versions} versions` : ""}`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (number >= 1024 && at < units.length - 1) {
    number /= 1024;
    at += 1;
  }
  return `${at ? number.toFixed(1) : number} ${units[at]}`;
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const at = new Date(seconds * 1000);
  const clock = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? clock : `${at.toLocaleDateString("en-CA")} ${clock}`;
}

// ---------------------------------------------------------------- small parts

export function Problem({ text }) {
  return text ? html`<p class="problem" role="alert">${text}</p>` : null;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Fact({ name, title, tone = "", children }) {
  return html`<div class="fact" title=${title}><dt>${name}</dt><dd class=${tone}>${children}</dd></div>`;
}

// Asks before something is done that cannot be undone. `question`: { text, detail, verb, act } or null.
export function Confirm({ question, done }) {
  const dialog = useRef(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  useEffect(() => {
    if (question) {
      setError("");
      dialog.current.showModal();
    } else if (dialog.current.open) {
      dialog.current.close();
    }
  }, [question]);
  async function go() {
    setBusy(true);
    try {
      await question.act();
      done();
    } catch (failure) {
      setError(failure.message);
    } finally {
      setBusy(false);
    }
  }
  return html`<dialog ref=${dialog} class="confirm" aria-label="Confirm" onClose=${done}>
    ${question && html`
      <h2>${question.text}</h2>
      <p>${question.detail}</p>
      <${Problem} text=${error} />
      <div class="buttons">
        <button type="button" autofocus onClick=${done}>Cancel</button>
        <button type="button" class="danger" disabled=${busy} onClick=${go}>${question.verb}</button>
      </div>`}
  </dialog>`;
}

// A chart over time. `series`: [{ name, values, unit }], of as many values as `times` (seconds) has.
export function Chart({ times, series, height = 140, label }) {
  const box = useRef(null);
  const chart = useRef(null);
  const [at, setAt] = useState(null); // the index of the moment under the pointer
  const shown = at === null || at >= times.length ? times.length - 1 : at;
  const names = series.map((each) => each.name).join("\n");
  useLayoutEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const inks = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"].map(ink);
    const axis = { stroke: ink("--dim"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { stroke: ink("--rule"), width: 1 }, font: "11px system-ui" };
    chart.current = new uPlot({
      width: box.current.clientWidth || 400,
      height,
      cursor: { points: { size: 6 }, y: false, drag: { x: false, y: false } },
      legend: { show: false },
      hooks: { setCursor: [(its) => setAt(its.cursor.idx ?? null)] },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB")) }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick >= 1000 ? `${tick / 1000}k` : `${tick}`)) }],
      series: [
        {},
        ...series.map((each, n) => ({ label: each.name, stroke: inks[n % inks.length], width: 1.5, points: { show: false } })),
      ],
    }, [times, ...series.map((each) => each.values)], box.current);
    const watcher = new ResizeObserver(() => chart.current?.setSize({ width: box.current.clientWidth, height }));
    watcher.observe(box.current);
    return () => {
      watcher.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [names, height, document.documentElement.dataset.theme]);
  useEffect(() => chart.current?.setData([times, ...series.map((each) => each.values)]));
  const value = (each) => (each.unit === "s" ? age(each.values[shown]) : each.unit === "/s" ? rate(each.values[shown]) : whole(each.values[shown]));
  return html`<figure class="chart">
    <figcaption>
      ${series.map((each, n) => html`<span><i class=${`ink-${(n % 6) + 1}`}></i>${each.name} <b>${times.length ? value(each) : ""}</b></span>`)}
      <span class="dim">${at === null ? "now" : time(times[shown])}</span>
    </figcaption>
    <div ref=${box} role="img" aria-label=${label}></div>
  </figure>`;
}
