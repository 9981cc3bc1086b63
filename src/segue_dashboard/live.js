// How is the process now? Tiles, tokens, connections, memory, engines, errors: small charts of the last update.

import { $, age, bytes, clock, count, h, median, s, short, span } from "./dom.js";

const RECENT = 60;
const BARS_MAX = 48;
const SOCKETS_MAX = 48;
const ERRORS_MAX = 40;

const spark = (values) => {
  const known = values.filter((one) => one !== null);
  // Of nothing there is no line.
  if (known.length < 2 || !known.some(Boolean)) return s("svg", { viewBox: "0 0 100 26" });
  const top = Math.max(...known) || 1;
  const points = known.map(
    (value, at) => `${((at * 100) / (known.length - 1)).toFixed(2)},${(24 - (value / top) * 21).toFixed(2)}`,
  );
  return s(
    "svg",
    { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("polygon", { class: "spark-area", points: `0,26 ${points.join(" ")} 100,26` }),
    s("polyline", { class: "spark", points: points.join(" ") }),
  );
};

export const tile = (title, [figure, unit], note, values, name) =>
  h(
    "div",
    { class: "tile", "data-tile": name },
    h("h3", {}, title),
    h("div", { class: "value" }, figure, unit ? h("small", {}, unit) : null),
    h("div", { class: "note" }, note),
    spark(values),
  );

const some = (value, words) => (value === null ? ["–", ""] : words(value));

export const drawTiles = (past, picture) => {
  const { totals, connections } = picture;
  const recent = past.turns.slice(-RECENT);
  const column = (name) => recent.map((one) => one[name]).filter((one) => one !== null);
  const perSecond = rates(past);
  const prompt = totals.reused + totals.tokenized;
  const shares = recent
    .filter((one) => one.reused + one.tokenized)
    .map((one) => one.reused / (one.reused + one.tokenized));
  $("tiles").replaceChildren(
    tile(
      "Turns",
      [count(totals.turns), ""],
      `${picture.running_count} running · ${perSecond.last} per second`,
      perSecond.values,
      "turns",
    ),
    tile(
      "Time to first token",
      some(median(column("first_ms")), span),
      "median of recent turns",
      column("first_ms"),
      "first",
    ),
    tile(
      "Tokens per second",
      some(median(column("speed")), (one) => [count(one), ""]),
      `${count(totals.output)} output tokens`,
      column("speed"),
      "speed",
    ),
    tile(
      "Prompt reused",
      prompt ? [((totals.reused * 100) / prompt).toFixed(1), "%"] : ["–", ""],
      `${count(totals.reused)} of ${count(prompt)} tokens`,
      shares,
      "reused",
    ),
    tile(
      "Overhead of Segue",
      some(median(column("own_ms")), span),
      "without the engine",
      column("own_ms"),
      "own",
    ),
    tile(
      "Connections",
      [count(connections.count), ""],
      `${connections.lanes} lane${connections.lanes === 1 ? "" : "s"} · ${connections.waiting} waiting`,
      history(connections.count),
      "connections",
    ),
  );
};

const counts = [];
const history = (now) => {
  counts.push(now);
  if (counts.length > RECENT) counts.shift();
  return counts;
};

// Turns that ended in each of the last seconds, and the mean of the latest of them: a turn may take many seconds, and
// is reported a moment after its end.
const RATE_S = 30;
const MEAN_S = 5;
export const rates = (past) => {
  const values = Array(RATE_S).fill(0);
  for (const turn of past.turns) {
    const back = Math.max(0, Math.floor((past.now_ms - turn.at_ms - (turn.total_ms ?? 0)) / 1000));
    if (back < RATE_S) values[RATE_S - 1 - back] += 1;
  }
  const mean = values.slice(-MEAN_S).reduce((sum, one) => sum + one, 0) / MEAN_S;
  return { values, last: mean < 10 ? Number(mean.toFixed(1)) : count(mean) };
};

export const drawTokens = (past) => {
  const box = $("tokens");
  const turns = past.turns.filter((one) => one.reused + one.tokenized).slice(-BARS_MAX);
  if (!turns.length) {
    box.replaceChildren(h("p", { class: "empty" }, "No prompts yet."));
    return;
  }
  const width = box.clientWidth;
  const height = box.clientHeight;
  const base = height - 18;
  const top = Math.max(...turns.map((one) => one.reused + one.tokenized));
  const step = Math.min(22, (width - 38) / Math.max(turns.length, 12));
  const rule = (share) => {
    const y = base - share * (base - 14);
    return s(
      "g",
      {},
      s("line", { class: "rule", x1: 36, x2: width, y1: y, y2: y }),
      s("text", { x: 30, y: y + 4, "text-anchor": "end" }, count(top * share)),
    );
  };
  const bars = turns.map((one, at) => {
    const x = 38 + at * step;
    const kept = (one.reused / top) * (base - 14);
    const made = Math.max(one.tokenized ? 1 : 0, (one.tokenized / top) * (base - 14));
    return s(
      "g",
      {},
      s("title", {}, `${short(one.id)}: ${one.reused} reused, ${one.tokenized} new`),
      s("rect", { class: "reused", x, y: base - kept, width: Math.max(1, step - 2), height: kept, rx: 1 }),
      s("rect", {
        class: "tokenized",
        x,
        y: base - kept - made,
        width: Math.max(1, step - 2),
        height: made,
        rx: 1,
      }),
    );
  });
  box.replaceChildren(
    s(
      "svg",
      { width, height, role: "img", "aria-label": "Reused and new prompt tokens of the last turns" },
      rule(0),
      rule(0.5),
      rule(1),
      ...bars,
      s("text", { class: "faint", x: 38, y: height - 4 }, "earlier"),
      s(
        "text",
        { class: "faint", x: 38 + turns.length * step, y: height - 4, "text-anchor": "end" },
        turns.length > 6 ? "now" : "",
      ),
    ),
  );
};

export const drawConnections = (picture, now) => {
  const { connections } = picture;
  $("connections-sub").textContent =
    `${count(connections.count)} open · ${connections.running} turns running · ${connections.waiting} waiting`;
  drawCells(connections);
  const head = ["id", "lanes", "running", "waiting", "turns", "memory", "age"];
  const rows = connections.rows
    .slice(0, SOCKETS_MAX)
    .map((one) =>
      h(
        "tr",
        {},
        h("td", { class: "mono" }, one.id),
        h("td", {}, one.lanes),
        h("td", {}, one.running),
        h("td", {}, one.waiting),
        h("td", {}, count(one.turns)),
        h("td", {}, bytes(one.bytes)),
        h("td", {}, age(now - one.opened_ms)),
      ),
    );
  $("sockets").replaceChildren(
    rows.length
      ? h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              head.map((name) => h("th", { scope: "col" }, name)),
            ),
          ),
          h("tbody", {}, rows),
        )
      : h("p", { class: "empty" }, "No open connections."),
  );
};

// A canvas: thousands of cells are drawn at once.
const drawCells = ({ cells, count: all }) => {
  const canvas = $("cells");
  canvas.hidden = !cells;
  if (!cells) return;
  const width = canvas.clientWidth;
  let size = 16;
  while (size > 3 && Math.ceil(cells.length / Math.floor(width / size)) * size > 120) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(cells.length / columns) * size;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  const look = getComputedStyle(document.documentElement);
  const [idle, busy] = [look.getPropertyValue("--line"), look.getPropertyValue("--accent")];
  const gap = size > 6 ? 3 : 1;
  pen.scale(ratio, ratio);
  for (let at = 0; at < cells.length; at += 1) {
    const load = Number(cells[at]);
    pen.globalAlpha = load ? Math.min(1, 0.55 + load / 10) : 1;
    pen.fillStyle = load ? busy : idle;
    pen.beginPath();
    pen.roundRect(
      (at % columns) * size,
      Math.floor(at / columns) * size,
      size - gap,
      size - gap,
      size > 8 ? 3 : 1,
    );
    pen.fill();
  }
  canvas.setAttribute(
    "aria-label",
    `${all} connections, ${[...cells].filter((one) => one !== "0").length} of them with running turns`,
  );
};

export const drawMemory = (picture, isOperator) => {
  $("lag").textContent =
    picture.lag_ms === null ? "" : `Event loop at most ${span(picture.lag_ms).join(" ")} late in the last minute`;
  $("memory").replaceChildren(
    ...(picture.memory.length
      ? picture.memory.map((one) => {
          const share = one.bytes_max ? one.bytes / one.bytes_max : 0;
          const bar = h("i", { class: share > 0.85 ? "high" : "" });
          bar.style.width = `${Math.min(100, share * 100)}%`;
          return h(
            "div",
            { class: "meter" },
            h(
              "div",
              {},
              h("span", {}, one.name),
              h("span", { class: "sub" }, `${bytes(one.bytes)} of ${bytes(one.bytes_max)}`),
            ),
            h(
              "div",
              {
                class: "track",
                role: "meter",
                "aria-label": one.name,
                "aria-valuemin": 0,
                "aria-valuemax": one.bytes_max,
                "aria-valuenow": one.bytes,
              },
              bar,
            ),
          );
        })
      : [h("p", { class: "empty" }, isOperator ? "No data yet." : "Visible with the operator scope.")]),
  );
};

const stateOf = (one) => (one.is_drained ? "drained" : one.is_up ? "up" : "down");

// A load that is not counted is shown as a dash.
const load = (value) => (value === null ? "–" : count(value));

export const drawEngines = (picture, isOperator) => {
  const { replicas } = picture;
  const sum = (name) => replicas.reduce((total, one) => total + (one[name] ?? 0), 0);
  const up = replicas.filter((one) => stateOf(one) === "up").length;
  $("engines-sub").textContent = replicas.length
    ? `${up} of ${replicas.length} up · ${sum("running")} running · ${sum("waiting")} in the queue`
    : "";
  const row = (one) =>
    h(
      "tr",
      { class: `engine ${stateOf(one)}` },
      h("td", {}, h("i", {}), stateOf(one)),
      h(
        "td",
        { class: "name", title: `${one.model} · ${one.name}` },
        one.name === one.model ? one.model : `${one.model} · ${one.name}`,
      ),
      h("td", {}, load(one.running)),
      h("td", {}, load(one.waiting)),
    );
  const head = ["state", "model and replica", "running", "queue"];
  $("engines").replaceChildren(
    replicas.length
      ? h(
          "table",
          {},
          h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, replicas.map(row)),
        )
      : h("p", { class: "empty" }, isOperator ? "Not checked yet." : "Visible with the operator scope."),
  );
};

export const drawErrors = (past, picture) => {
  const failed = past.turns
    .filter((one) => one.status === "failed")
    .map((one) => ({
      at: one.at_ms,
      what: one.error ?? "failed",
      where: one.transport,
      detail: short(one.id),
    }));
  const refused = picture.refusals.map((one) => ({
    at: one.at_ms,
    what: one.code,
    where: one.transport,
    detail: `× ${one.count}`,
  }));
  const rows = [...failed, ...refused].sort((a, b) => b.at - a.at).slice(0, ERRORS_MAX);
  const times = picture.refusals.reduce((sum, one) => sum + one.count, 0);
  $("errors-sub").textContent =
    `${count(picture.totals.failed)} failed turns · ${count(times)} refused requests`;
  $("errors").replaceChildren(
    rows.length
      ? h(
          "table",
          {},
          h(
            "tbody",
            {},
            rows.map((one) =>
              h(
                "tr",
                {},
                h("td", { class: "bad" }, one.what),
                h("td", {}, one.where),
                h("td", { class: "mono" }, one.detail),
                h("td", {}, clock(one.at)),
              ),
            ),
          ),
        )
      : h("p", { class: "empty" }, "None."),
  );
};
