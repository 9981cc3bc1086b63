// What does the page show? Connects the feed to the charts, and the URL to a view.

import { hasKey, setKey } from "./api.js";
import { renewAdvice } from "./cache.js";
import { $, age, h, painter } from "./dom.js";
import { followContainers } from "./containers.js";
import { follow } from "./feed.js";
import { drawFirst, offerFirst, startFirst } from "./first.js";
import { openFigures } from "./figures.js";
import { drawFleet, followFleet } from "./fleet.js";
import { drawConnections, drawEngines, drawErrors, drawMemory, drawTiles, drawTokens } from "./live.js";
import { loadKeys, startKeys } from "./keys.js";
import { Past } from "./past.js";
import { startPlay } from "./play.js";
import { drawRace, renewSizes, startRace } from "./race.js";
import { openReader } from "./reader.js";
import { loadStored, startStored } from "./stored.js";
import { startTheme } from "./theme.js";
import { drawTree } from "./tree.js";
import { drawWaterfall, legend, setAxis } from "./waterfall.js";

const EMPTY = {
  totals: { turns: 0, failed: 0, tokenized: 0, reused: 0, input: 0, output: 0, bytes: 0 },
  connections: { count: 0, lanes: 0, running: 0, waiting: 0, cells: "", rows: [] },
  running_count: 0,
  running: [],
  memory: [],
  replicas: [],
  refusals: [],
  backlog: null,
  lag_ms: null,
};
const VIEWS = ["live", "race", "playground", "stored", "fleet", "keys"];

const past = new Past();
let picture = EMPTY;
let process = null;
let isOperator = true;
let hasContainers = false;

// --- live ---

const draw = painter(() => {
  if (document.hidden) return;
  drawFleet();
  if ($("live-view").hidden) return;
  drawFirst(past, picture);
  drawTiles(past, picture);
  drawWaterfall(past, openFigures);
  drawTokens(past);
  drawTree(past, picture.running, openReader, draw);
  drawConnections(picture, past.now_ms);
  drawMemory(picture, isOperator);
  drawEngines(picture, isOperator);
  drawErrors(past, picture);
});

// A turn that the page does not know has only what the server still knows of its cache.
const openTurn = (id) => openFigures(past.byId.get(id) ?? { id });

const banner = (text, kind = "", ms = 0) => {
  const box = $("banner");
  box.textContent = text;
  box.dataset.kind = kind;
  box.hidden = !text;
  clearTimeout(banner.timer);
  if (ms)
    banner.timer = setTimeout(() => {
      box.hidden = true;
    }, ms);
};

const offer = (models) => {
  for (const select of document.querySelectorAll('select[name="model"]')) {
    const chosen = select.value;
    select.replaceChildren(...models.map((name) => h("option", { value: name }, name)));
    if (models.includes(chosen)) select.value = chosen;
  }
};

const feed = follow({
  hello(message) {
    $("ask").close();
    past.clear(message.marks);
    picture = EMPTY;
    if (process && process !== message.process)
      banner("The server was restarted. All figures start again.", "good", 8000);
    else banner("");
    process = message.process;
    isOperator = message.is_operator;
    hasContainers = message.has_containers;
    for (const view of ["fleet", "keys"])
      document.querySelector(`.bar nav a[href="#${view}"]`).hidden = !isOperator;
    if (location.hash === "#fleet") followFleet(draw);
    if (location.hash === "#keys") loadKeys();
    if (location.hash === "#stored") loadStored();
    document.body.dataset.process = process;
    $("link").title = `Segue ${message.version}, up for ${age(Date.now() - message.started_ms)}`;
    offer(message.models);
    offerFirst(message.models);
    renewSizes();
    renewAdvice(openTurn, 0);
    if (hasContainers) followContainers();
    draw();
  },
  update(message) {
    past.now_ms = message.now_ms;
    past.add(message.turns);
    if (message.turns.length) renewAdvice(openTurn);
    past.missed += message.missed;
    picture = message.picture ?? picture;
    draw();
  },
  state(name, text) {
    $("link").dataset.state = name;
    $("link").querySelector("span").textContent = text;
    if (name === "lost" && process)
      banner(`The server cannot be reached. The figures are out of date; ${text}.`);
  },
  denied(error) {
    $("ask-wrong").hidden = !hasKey();
    $("ask-wrong").textContent = `This key was not accepted: ${error.message}`;
    $("key").hidden = false;
    if (!$("ask").open) $("ask").showModal();
    $("ask-form").elements.key.select();
  },
});

// --- key ---

$("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(event.target.elements.key.value.trim());
  feed.retry();
});
$("key").addEventListener("click", () => $("ask").showModal());
$("link").addEventListener("click", () => feed.retry());

// --- views ---

// The ids of the views are not the names in the URL: a browser would scroll to them, under the header.
let shown = "";
const show = () => {
  const wanted = location.hash.slice(1);
  const name = VIEWS.includes(wanted) ? wanted : (wanted && shown) || VIEWS[0];
  if (name !== shown) scrollTo(0, 0);
  shown = name;
  for (const view of VIEWS) {
    $(`${view}-view`).hidden = view !== name;
    document.querySelector(`.bar nav a[href="#${view}"]`).ariaCurrent = view === name ? "page" : null;
  }
  draw();
  drawRace();
  if (name === "race" && process) renewSizes();
  if (name === "keys") loadKeys();
  if (name === "stored") loadStored();
  if (name === "live" && hasContainers) followContainers();
  if (name === "fleet") followFleet(draw);
};

for (const link of document.querySelectorAll(".bar a")) link.addEventListener("click", () => scrollTo(0, 0));

for (const button of document.querySelectorAll("[data-axis]")) {
  const choose = () => {
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.setAttribute("aria-checked", other === button);
      other.tabIndex = other === button ? 0 : -1;
    }
    setAxis(button.dataset.axis);
    draw();
  };
  button.addEventListener("click", choose);
  button.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) {
      const other = button.nextElementSibling ?? button.previousElementSibling;
      other.focus();
      other.click();
    }
  });
}
for (const button of document.querySelectorAll("[data-close]"))
  button.addEventListener("click", () => button.closest("dialog").close());

$("legend").replaceChildren(...legend());
startRace();
startPlay();
startFirst();
startStored(openReader);
startKeys(() => feed.retry());
startTheme(draw);
show();
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", draw);
// Rates and ages change while nothing happens.
setInterval(draw, 1000);
new ResizeObserver(draw).observe($("live-view"));
