// Which replicas and processes are there, what does each do, and where does each conversation live? For operators.

import { askJson } from "./api.js";
import { wordsOf } from "./cache.js";
import { $, age, count, h, short } from "./dom.js";
import { tile } from "./live.js";

const PLACE = "/dashboard/fleet";
const RENEW_MS = 2000;
const CHAINS_MAX = 40;

let fleet = null;
let problem = "";
let timer = 0;

const sum = (rows, name) => rows.reduce((total, one) => total + one[name], 0);
const many = (n, word, plural = `${word}s`) => `${count(n)} ${n === 1 ? word : plural}`;
// The scheme is the same for all.
const place = (name) => name.replace(/^https?:\/\//, "");
// An engine that never reports cached tokens has no hit rate.
const rate = (rows) => {
  const cached = sum(rows, "cached_tokens");
  return cached ? (cached * 100) / sum(rows, "input_tokens") : null;
};
const percent = (value) => (value === null ? "–" : `${value.toFixed(1)} %`);

const table = (label, head, rows, empty) =>
  rows.length
    ? h(
        "table",
        { "aria-label": label },
        h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((one) => h("td", {}, one))))),
      )
    : h("p", { class: "empty" }, empty);

// --- replicas ---

const meter = (value) => {
  const bar = h("i", {});
  bar.style.width = `${value ?? 0}%`;
  return h("div", { class: "track", "aria-hidden": "true" }, bar);
};

const figure = (name, value) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value));

const card = (one, lives) => {
  const hits = rate([one]);
  const lost = sum(one.lost, "tokens");
  return h(
    "section",
    { class: `replica engine ${one.state}`, "data-replica": one.name },
    h(
      "header",
      {},
      h("h3", { title: one.name }, h("i", {}), place(one.name)),
      h("span", { class: "pill", "data-state": one.state }, one.state),
    ),
    h("p", { class: "sub" }, one.model),
    h("div", { class: "meter" }, h("div", {}, "found in its cache", h("b", {}, percent(hits))), meter(hits)),
    h(
      "dl",
      {},
      figure("running", count(one.running)),
      figure("waiting", count(one.waiting)),
      figure("turns", count(one.turns)),
      figure("conversations", count(lives)),
      figure("prompt tokens", count(one.input_tokens)),
      figure("reads per second", one.prefill_tokens_s === null ? "–" : `${count(one.prefill_tokens_s)} tokens`),
      figure("cache misses", lost ? `${count(lost)} tokens` : "none"),
    ),
  );
};

const lossRows = (replicas) =>
  replicas
    .flatMap((one) => one.lost.map((loss) => ({ ...loss, name: one.name })))
    .sort((a, b) => b.tokens - a.tokens)
    .map((one) => [place(one.name), wordsOf(one.reason), count(one.turns), count(one.tokens)]);

export const drawFleet = () => {
  if ($("fleet-view").hidden) return;
  $("fleet-wrong").hidden = !problem;
  $("fleet-wrong").textContent = problem;
  if (!fleet) return;
  const { replicas, conversations, processes, processes_known: known } = fleet;
  const up = replicas.filter((one) => one.state === "up").length;
  const drained = replicas.filter((one) => one.state === "drained").length;
  const machines = new Set(processes.map((one) => one.machine)).size;
  const hits = rate(replicas);
  $("fleet-tiles").replaceChildren(
    tile("Replicas", [count(up), ` of ${replicas.length} up`], many(drained, "drained", "drained"), [], "replicas"),
    tile("In flight", [count(sum(replicas, "running")), ""], `${count(sum(replicas, "waiting"))} waiting`, [], "flight"),
    tile("Found in caches", hits === null ? ["–", ""] : [hits.toFixed(1), "%"], `of ${count(sum(replicas, "input_tokens"))} prompt tokens`, [], "hits"),
    tile("Prefix cache misses", [count(sum(replicas.flatMap((one) => one.lost), "tokens")), ""], "tokens computed again", [], "lost"),
    tile("Processes", [count(processes.length), ""], `${many(machines, "machine")}${known > processes.length ? ` · ${known - processes.length} not answering` : ""}`, [], "processes"),
  );
  $("fleet-replicas").replaceChildren(
    ...(replicas.length
      ? replicas.map((one) => card(one, conversations.filter((life) => life.replica === one.name).length))
      : [h("p", { class: "empty" }, "No engine of this server has a URL.")]),
  );
  $("fleet-chains").replaceChildren(
    table(
      "Conversations",
      ["conversation", "turns", "replica", "moved"],
      conversations.slice(0, CHAINS_MAX).map((one) => [short(one.id), count(one.turns), place(one.replica), one.moves ? many(one.moves, "time") : "–"]),
      "No conversations yet.",
    ),
  );
  $("fleet-losses").replaceChildren(
    table("Prefix cache misses", ["replica", "reason", "turns", "tokens"], lossRows(replicas), "Every prefix was where it was expected."),
  );
  $("fleet-processes").replaceChildren(
    table(
      "Processes",
      ["machine", "process", "responses", "connections", "up for"],
      processes.map((one) => [one.machine, String(one.pid), count(one.responses_running), count(one.connections), age(Date.now() - one.started_at * 1000)]),
      "",
    ),
  );
};

// Ask for as long as the view is shown.
export const followFleet = (redraw) => {
  clearTimeout(timer);
  const renew = async () => {
    if ($("fleet-view").hidden) return;
    if (!document.hidden) {
      try {
        fleet = await askJson(PLACE);
        problem = "";
      } catch (error) {
        problem = `The fleet cannot be read: ${error.message}`;
      }
      redraw();
    }
    timer = setTimeout(renew, RENEW_MS);
  };
  renew();
};
