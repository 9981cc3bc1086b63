// How much does the transport matter? The same scripted conversation over HTTP and over WebSocket.
// The two lanes alternate turn by turn, so that neither waits for the other's work on the engine.

import { ask, askJson, eventsOf, openSocket } from "./api.js";
import { $, age, bytes, count, h, median, painter, s, took } from "./dom.js";

const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed", "error"]);
// The output of a tool in a real coding session: about 2,000 characters.
const OUTPUT_WORDS = 333;
// Histories to choose from, in words, each of which is about one token; in a vocabulary that has not all of them, more.
const HISTORIES = [500, 2000, 4000, 8000, 20000, 100000];
const TOKENS_PER_WORD = 1.15;
// Instructions, the tool and the frame of the first message; of every later turn, the frames of a call and its output.
const BASE_TOKENS = 400;
const FRAME_TOKENS = 50;
// Turns and history where nothing else is chosen. Models with a small context are mostly those that run without a GPU
// and read slowly: theirs is a shorter race.
const USUAL = { turns: 16, history: 8000 };
const SHORT = { turns: 6, history: 2000 };
// As far as a model is trusted that does not say how much it takes; more can be chosen.
const CONTEXT_UNKNOWN = 8192;
const WORDS = (
  "the function reads a file and returns its lines while the test waits for a result " +
  "that another module wrote before"
).split(" ");
const TOOLS = [
  {
    type: "function",
    name: "read_file",
    description: "Reads a file of the project.",
    strict: false,
    parameters: {
      type: "object",
      properties: { path: { type: "string", description: "Where it lies." } },
      required: ["path"],
    },
  },
];

const size = (text) => new TextEncoder().encode(text).length;
const prose = (tokens, seed) =>
  Array.from({ length: tokens }, (_, at) => WORDS[(at * 7 + seed + (at >> 4)) % WORDS.length]).join(" ");

// The next input of the client, from the output of the model: the same rule in both lanes.
const reply = (output, turn) => {
  const calls = output.filter((item) => item.type === "function_call");
  // Several calls share what one would get, so that a turn never adds more.
  const outputs = calls.map((item) => ({
    type: "function_call_output",
    call_id: item.call_id,
    output: prose(OUTPUT_WORDS / calls.length, turn),
  }));
  return outputs.length
    ? outputs
    : [{ type: "message", role: "user", content: `Step ${turn}: go on with the next file.` }];
};

// --- what fits the model ---

// Tokens that a race of so many turns takes at most, beside its history.
const spent = (turns, output) => BASE_TOKENS + turns * (output + OUTPUT_WORDS * TOKENS_PER_WORD + FRAME_TOKENS);
const fits = (history, turns, output, context) => spent(turns, output) + history * TOKENS_PER_WORD <= context;
// Model -> the tokens that its context holds, where it says so.
let windows = new Map();
// What the person has chosen: it stays for as long as it fits.
const chosen = { turns: false, context: false };

const offerSizes = () => {
  const { model, turns, context, output } = $("race-form").elements;
  const known = windows.get(model.value);
  const window = known ?? CONTEXT_UNKNOWN;
  const tokens = Number(output.value);
  const usual = fits(USUAL.history, USUAL.turns, tokens, window) ? USUAL : SHORT;
  if (!chosen.turns) turns.value = usual.turns;
  let many = Math.max(2, Number(turns.value));
  while (known && many > 2 && !fits(HISTORIES[0], many, tokens, known)) many -= 1;
  if (many < Number(turns.value)) turns.value = many;
  const offered = HISTORIES.filter((one) => !known || fits(one, many, tokens, known));
  const fitting = offered.findLast((one) => one <= usual.history && fits(one, many, tokens, window));
  const wanted = chosen.context && offered.includes(Number(context.value)) ? context.value : fitting;
  context.replaceChildren(...offered.map((one) => h("option", { value: one }, `${one / 1000}k tokens`)));
  context.value = wanted ?? HISTORIES[0];
  $("race-fits").textContent = offered.length
    ? known && offered.length < HISTORIES.length
      ? `All turns must fit into the ${count(known)} tokens of this model.`
      : ""
    : `The ${count(known)} tokens of this model are too few for a race.`;
  $("race-go").disabled = !offered.length && !stopping;
};

// Which models there are, and how much each takes, may have changed.
export const renewSizes = async () => {
  try {
    const { data } = await askJson("/v1/models");
    windows = new Map(data.map((one) => [one.id, one.context_window]));
  } catch {
    // A key without the scope for it: then as for a model that does not say.
    windows = new Map();
  }
  offerSizes();
};

class Lane {
  constructor(kind, title, plan) {
    Object.assign(this, { kind, title, plan, turns: [], began: 0, sent: 0, received: 0, ended: false });
  }
  get total() {
    return this.turns.reduce((sum, one) => sum + one.ms, 0);
  }
  // One small turn that is not counted: the lane that goes first must not pay for what the process does only once.
  async warm() {
    await this.exchange([{ type: "message", role: "user", content: "Are you ready?" }], () => {});
    this.reset();
    Object.assign(this, { sent: 0, received: 0 });
  }
  base(input) {
    return {
      model: this.plan.model,
      instructions: "You are a careful engineer. Use the tools.",
      tools: TOOLS,
      input,
      store: false,
      max_output_tokens: this.plan.output,
      temperature: 0,
    };
  }
  opening(seed) {
    return [
      {
        type: "message",
        role: "user",
        content: `${this.kind}${seed} ${prose(this.plan.context, seed)}\nRead the first file.`,
      },
    ];
  }

  async turn(fresh) {
    this.began = performance.now();
    const before = this.sent;
    let first = null;
    const last = await this.exchange(fresh, () => {
      first ??= performance.now() - this.began;
    });
    if (last.type === "error" || last.type === "response.failed")
      throw new Error(`${this.title}: ${(last.error ?? last.response?.error)?.message ?? "the turn failed"}`);
    this.turns.push({ ms: performance.now() - this.began, first, sent: this.sent - before });
    this.began = 0;
    return last.response;
  }
}

class HttpLane extends Lane {
  constructor(plan) {
    super("http", "HTTP, whole history", plan);
    this.reset();
  }
  reset() {
    this.history = [];
  }

  async exchange(fresh, heard) {
    this.history.push(...fresh);
    const body = JSON.stringify({ ...this.base(this.history), stream: true });
    this.sent += size(body);
    const answer = await ask("/v1/responses", {
      method: "POST",
      body,
      headers: { "content-type": "application/json" },
      signal: this.plan.signal,
    });
    for await (const data of eventsOf(answer, (n) => {
      this.received += n;
    })) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.type.endsWith(".delta")) heard();
      if (TERMINAL.has(event.type)) {
        this.history.push(...(event.response?.output ?? []));
        return event;
      }
    }
    throw new Error("HTTP: the stream ended early.");
  }
}

class SocketLane extends Lane {
  constructor(plan) {
    super("socket", "WebSocket, new items only", plan);
    this.reset();
  }
  reset() {
    this.last = null;
  }

  async open() {
    this.socket = openSocket();
    await new Promise((resolve, reject) => {
      this.socket.onopen = resolve;
      this.socket.onerror = () => reject(new Error("The WebSocket connection could not be opened."));
    });
  }

  exchange(fresh, heard) {
    const frame = JSON.stringify({
      type: "response.create",
      ...this.base(fresh),
      ...(this.last ? { previous_response_id: this.last } : {}),
    });
    this.sent += size(frame);
    return new Promise((resolve, reject) => {
      this.socket.onclose = () => reject(new Error("The WebSocket connection was closed."));
      this.socket.onmessage = ({ data }) => {
        this.received += data.length;
        const event = JSON.parse(data);
        if (event.type.endsWith(".delta")) heard();
        if (TERMINAL.has(event.type)) {
          this.last = event.response?.id ?? null;
          resolve(event);
        }
      };
      this.socket.send(frame);
    });
  }

  close() {
    if (this.socket) {
      this.socket.onclose = null;
      this.socket.close();
    }
  }
}

const course = (lane, longest) => {
  const blocks = lane.turns.map((one) => {
    const block = h("i", { class: lane.kind, title: took(one.ms) });
    block.style.width = `${(one.ms / longest) * 100}%`;
    return block;
  });
  if (lane.began) {
    const block = h("i", { class: `${lane.kind} now` });
    block.style.width = `${((performance.now() - lane.began) / longest) * 100}%`;
    blocks.push(block);
  }
  const first = median(lane.turns.map((one) => one.first).filter((one) => one !== null));
  const figures = [
    `turn ${lane.turns.length} of ${lane.plan.turns}`,
    `sent ${bytes(lane.sent)}`,
    `received ${bytes(lane.received)}`,
    ...(first === null ? [] : [`first token ${took(first)}`]),
  ];
  return h(
    "div",
    { class: "runner", "data-lane": lane.kind, "data-turns": lane.turns.length },
    h(
      "div",
      { class: "who" },
      h("b", {}, lane.title),
      h("span", { class: "sub" }, figures.join(" · ")),
      h("span", { class: "time" }, took(lane.total + (lane.began ? performance.now() - lane.began : 0))),
    ),
    h("div", { class: "course" }, blocks),
  );
};

const lines = (box, lanes, read, write) => {
  const width = box.clientWidth;
  const height = 220;
  const [left, base, peak] = [58, height - 24, 12];
  const top = Math.max(1e-9, ...lanes.flatMap((lane) => lane.turns.map(read)));
  const turns = lanes[0].plan.turns;
  const x = (at) => left + 8 + (at * (width - left - 20)) / Math.max(1, turns - 1);
  const y = (value) => base - (value / top) * (base - peak);
  const rules = [0, 0.5, 1].map((share) =>
    s(
      "g",
      {},
      s("line", { class: "rule", x1: left, x2: width, y1: y(top * share), y2: y(top * share) }),
      s("text", { x: left - 7, y: y(top * share) + 4, "text-anchor": "end" }, write(top * share)),
    ),
  );
  const drawn = lanes.map((lane) =>
    s(
      "g",
      {},
      s("polyline", {
        class: `line ${lane.kind}`,
        points: lane.turns.map((one, at) => `${x(at)},${y(read(one))}`).join(" "),
      }),
      ...lane.turns.map((one, at) =>
        s("circle", { class: `dot ${lane.kind}`, cx: x(at), cy: y(read(one)), r: 3.5 }),
      ),
    ),
  );
  box.replaceChildren(
    s(
      "svg",
      { width, height, role: "img", "aria-label": "HTTP and WebSocket, per turn" },
      ...rules,
      ...drawn,
      s("text", { class: "faint", x: left + 4, y: height - 5 }, "turn 1"),
      s("text", { class: "faint", x: width - 4, y: height - 5, "text-anchor": "end" }, `turn ${turns}`),
    ),
  );
};

const verdict = ([http, socket]) => {
  const saved = 1 - socket.total / http.total;
  const fewer = http.sent / Math.max(1, socket.sent);
  const time =
    saved > 0.02
      ? h("em", {}, `${Math.round(saved * 100)} % less time`)
      : saved < -0.02
        ? `${Math.round(-saved * 100)} % more time`
        : "about the same time";
  return [
    "WebSocket took ",
    time,
    ` and sent ${fewer >= 1.5 ? `${fewer.toFixed(fewer < 10 ? 1 : 0)} times fewer bytes` : "about the same number of bytes"}.`,
  ];
};

let lanes = [];
let stopping = null;

// --- how far it is ---

// What is left, by the turns so far; the first turn of each lane says nothing of the others.
const leftOf = (left) => {
  const known = lanes.flatMap((lane) => lane.turns.slice(1));
  if (!known.length) return "; the first two read the whole history";
  const began = Math.max(...lanes.map((lane) => lane.began)) || performance.now();
  const ms = (left * known.reduce((sum, one) => sum + one.ms, 0)) / known.length + began - performance.now();
  return `, about ${age(Math.max(1000, ms))} left`;
};

const drawProgress = () => {
  $("race-progress").hidden = !stopping;
  if (!stopping) return;
  const [bar, words] = $("race-progress").children;
  const all = lanes.reduce((sum, lane) => sum + lane.plan.turns, 0);
  const done = lanes.reduce((sum, lane) => sum + lane.turns.length, 0);
  Object.assign(bar, { max: all, value: done });
  words.textContent = `${done} of ${all} turns done${leftOf(all - done)}`;
};

const draw = painter(() => {
  if (!lanes.length || $("race-view").hidden) return;
  const longest = Math.max(
    ...lanes.map((lane) => lane.total + (lane.began ? performance.now() - lane.began : 0)),
    1,
  );
  $("lanes").replaceChildren(...lanes.map((lane) => course(lane, longest)));
  lines($("race-times"), lanes, (one) => one.ms, took);
  lines($("race-bytes"), lanes, (one) => one.sent, bytes);
  drawProgress();
  if (lanes.some((lane) => lane.began)) setTimeout(draw, 60);
});

const run = async (plan) => {
  const [http, socket] = (lanes = [new HttpLane(plan), new SocketLane(plan)]);
  const seed = Math.floor(Math.random() * 1e6);
  draw();
  try {
    await socket.open();
    for (const lane of lanes) await lane.warm();
    const says = new Map(lanes.map((lane) => [lane, lane.opening(seed)]));
    for (let turn = 1; turn <= plan.turns; turn += 1) {
      // The order alternates, so that drift affects both alike.
      for (const lane of turn % 2 ? [http, socket] : [socket, http]) {
        plan.signal.throwIfAborted();
        const waiting = lane.turn(says.get(lane));
        draw();
        says.set(lane, reply((await waiting).output, turn));
      }
    }
    $("race-result").replaceChildren(...verdict(lanes));
  } catch (error) {
    for (const lane of lanes) lane.began = 0;
    $("race-result").replaceChildren(
      plan.signal.aborted ? "Stopped." : h("span", { class: "bad" }, error.message),
    );
  } finally {
    socket.close();
    draw();
  }
};

export const drawRace = draw;

export const startRace = () => {
  $("race-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stopping) {
      stopping.abort();
      return;
    }
    const form = new FormData(event.target);
    stopping = new AbortController();
    $("race-go").textContent = "Stop";
    $("race-result").replaceChildren("Running…");
    await run({
      model: form.get("model"),
      turns: Number(form.get("turns")),
      context: Number(form.get("context")),
      output: Number(form.get("output")),
      signal: stopping.signal,
    });
    stopping = null;
    $("race-go").textContent = "Race again";
    offerSizes();
    draw();
  });
  const { model, turns, context, output } = $("race-form").elements;
  for (const field of [turns, context])
    field.addEventListener("change", () => {
      chosen[field.name] = true;
    });
  for (const field of [model, turns, output]) field.addEventListener("change", offerSizes);
  addEventListener("resize", draw);
};
