// The page: finds out what is to be shown, asks for samples again and again, and draws the view.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { DataView } from "./data.js";
import { FailedView } from "./failed.js";
import { ActivityView } from "./activity.js";
import { age, ask, Fact, here, link, Problem, whole } from "./parts.js";
import { PipelineView } from "./pipeline.js";
import { TabletsView } from "./tablets.js";

const VIEWS = [
  ["pipeline", "Pipeline", PipelineView],
  ["failed", "Failed", FailedView],
  ["data", "Data", DataView],
  ["tablets", "Tablets", TabletsView],
  ["activity", "Activity", ActivityView],
];
const STORE_EVERY = 5; // samples
const HIDDEN_MS = 30000; // between two samples while nobody looks

function useLive() {
  const [store, setStore] = useState(null);
  const [samples, setSamples] = useState([]);
  const [problem, setProblem] = useState("");
  const again = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let ended = false;
    let last = 0;
    let begun = 0;
    let turn = 0;
    let everyMs = 2000;
    let kept = 900;
    async function look() {
      clearTimeout(timer);
      try {
        let told = await ask("samples", { after: last });
        const anew = told.begun !== begun; // the server has been started again, and counts from 1
        if (anew && last) told = await ask("samples", { after: 0 });
        if (ended) return;
        begun = told.begun;
        last = told.samples.at(-1)?.number ?? (anew ? 0 : last);
        if (anew || told.samples.length) setSamples((before) => [...(anew ? [] : before), ...told.samples].slice(-kept));
        if (turn % STORE_EVERY === 0) {
          const found = await ask("store");
          if (ended) return;
          everyMs = found.every_s * 1000;
          kept = found.kept;
          setStore(found);
        }
        turn += 1;
        setProblem("");
      } catch (error) {
        if (ended) return;
        turn = 0;
        setProblem(error.status ? error.message : "No answer: the process that serves this page may have ended.");
      }
      timer = setTimeout(look, document.hidden ? HIDDEN_MS : everyMs);
    }
    again.current = () => {
      turn = 0;
      look();
    };
    const seen = () => document.hidden || look();
    document.addEventListener("visibilitychange", seen);
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, []);
  return { store, samples, problem, refresh: () => again.current() };
}

function useHere() {
  const [at, setAt] = useState(here());
  useEffect(() => {
    const moved = () => setAt(here());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return at;
}

function useTheme() {
  const root = document.documentElement.dataset; // theme.js sets it
  const [theme, setTheme] = useState(root.theme);
  function toggle() {
    const next = root.theme === "dark" ? "light" : "dark";
    root.chosen = root.theme = next;
    try {
      localStorage.setItem("perco-theme", next);
    } catch { /* storage may be forbidden: then the choice lasts as long as the page */ }
    setTheme(next);
  }
  return [theme, toggle];
}

function useKeys(toggleTheme, showHelp) {
  useEffect(() => {
    function pressed(event) {
      const inField = event.target.closest?.("input, select, textarea");
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (inField) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const number = Number(event.key);
      if (number >= 1 && number <= VIEWS.length) location.hash = link(VIEWS[number - 1][0]);
      else if (event.key === "t") toggleTheme();
      else if (event.key === "?") showHelp();
      else if (event.key === "/") document.querySelector("[data-search]")?.focus();
      else if (event.key === "Escape") document.querySelector("[data-close]")?.click();
      else return;
      event.preventDefault();
    }
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [toggleTheme, showHelp]);
}

function Help({ open, close }) {
  const dialog = useRef(null);
  useEffect(() => {
    if (open) dialog.current.showModal();
    else if (dialog.current.open) dialog.current.close();
  }, [open]);
  const keys = [
    ...VIEWS.map(([, title], at) => [String(at + 1), title]),
    ["/", "to the search field, in Failed and Data"],
    ["Esc", "leave a field, close a panel"],
    ["t", "light or dark"],
    ["?", "these keys"],
  ];
  return html`<dialog ref=${dialog} class="help" aria-label="Keys" onClose=${close}>
    <h2>Keys</h2>
    <dl>${keys.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <div class="buttons"><button type="button" autofocus onClick=${close}>Close</button></div>
  </dialog>`;
}

function Strip({ store, samples }) {
  const sample = samples.at(-1);
  const silent = sample ? Date.now() / 1000 - sample.at : 0;
  const stale = silent > 4 * (store?.every_s ?? 2);
  const lags = Object.values(sample?.lag ?? {});
  const sum = (name) => lags.reduce((total, each) => total + each[name], 0);
  const oldest = Math.max(0, ...lags.filter((each) => each.waiting).map((each) => each.oldest_s));
  const owner = store?.owner;
  const failed = sum("failed");
  return html`<dl class=${`strip ${stale ? "stale" : ""}`} title=${stale ? `last heard of ${age(silent)} ago` : undefined}>
    <${Fact} name="owner's process" tone=${sample && !sample.owner ? "warn" : ""}>
      <span title=${owner?.command ?? ""}>${sample ? (sample.owner ? sample.owner : "not open") : ""}</span>
    <//>
    <${Fact} name="waiting">${sample ? whole(sum("waiting")) : ""}<//>
    <${Fact} name="oldest">${sum("waiting") ? age(oldest) : "–"}<//>
    <${Fact} name="failing" title="waiting, and have had a failed run" tone=${sum("failing") ? "warn" : ""}>${sample ? whole(sum("failing")) : ""}<//>
    <${Fact} name="failed" title="given up: they are on the failed list" tone=${failed ? "bad" : ""}>${sample ? whole(failed) : ""}<//>
    <${Fact} name="history from">${store ? past(store.history.watermark) : ""}<//>
  </dl>`;
}

function past(watermark) {
  return !watermark.ts ? "the beginning" : watermark.age_s === null ? `timestamp ${watermark.ts}` : `${age(watermark.age_s)} ago`;
}

function Page() {
  const live = useLive();
  const at = useHere();
  const [, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  useKeys(toggleTheme, () => setHelp(true));
  const [, title, View] = VIEWS.find(([name]) => name === at.view) ?? VIEWS[0];
  const problem = live.problem || live.samples.at(-1)?.problem || "";
  useEffect(() => {
    const name = live.store?.store.replace(/\/+$/, "").split("/").at(-1);
    document.title = name ? `${name} · perco` : "perco";
  }, [live.store?.store]);
  return html`
    <a class="skip" href="#view" onClick=${(event) => { event.preventDefault(); document.getElementById("view").focus(); }}>Skip to the view</a>
    <header>
      <div class="brand"><img src="static/icon.svg" alt="" width="22" height="22" /><b>perco</b><span class="path" title=${live.store?.store}><bdi>${live.store?.store ?? ""}</bdi></span></div>
      <nav aria-label="Views">
        ${VIEWS.map(([name, text], n) => html`<a href=${link(name)} aria-current=${name === at.view ? "page" : undefined} title=${`key ${n + 1}`}>${text}</a>`)}
      </nav>
      <div class="tools">
        <button type="button" class="quiet" onClick=${toggleTheme} aria-label="Light or dark" title="light or dark (t)">◐</button>
        <button type="button" class="quiet" onClick=${() => setHelp(true)} aria-label="Keys" title="keys (?)">?</button>
      </div>
    </header>
    <${Strip} store=${live.store} samples=${live.samples} />
    <${Problem} text=${problem} />
    <main id="view" tabindex="-1" aria-label=${title} key=${at.view}>
      ${live.store ? html`<${View} ...${live} rest=${at.rest} query=${at.query} />` : !problem && html`<p class="empty">Loading …</p>`}
    </main>
    <footer>perco ${live.store?.perco ?? ""} · catalogue ${live.store?.catalogue ?? ""} · press <kbd>?</kbd> for keys</footer>
    <${Help} open=${help} close=${() => setHelp(false)} />`;
}

render(html`<${Page} />`, document.getElementById("page"));
