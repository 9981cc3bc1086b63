// What happens on a WebSocket connection? Send a message, see every event, steer while it runs.

import { openSocket } from "./api.js";
import { $, h, painter, short, took } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const EVENTS_MAX = 400;
const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);

let socket = null;
let parent = null;
let running = null;
let began = 0;
let seen = 0;
let waiting = [];
const bubbles = new Map();

const form = () => new FormData($("play-form"));

// On a touch screen Enter makes a new line, as in other apps; there the button sends.
const touch = matchMedia("(pointer: coarse)");

const hint = () => {
  const text = $("play-form").elements.text;
  const [what, sends] = running ? ["Steer the running response.", "steers"] : ["Type a message.", "sends"];
  text.placeholder = touch.matches ? what : `${what} Enter ${sends}, Shift + Enter makes a new line.`;
  text.enterKeyHint = touch.matches ? "enter" : "send";
};

const buttons = () => {
  hint();
  $("play-steer").disabled = $("play-stop").disabled = !running;
  $("play-sub").textContent = running
    ? `Running: ${running}`
    : parent
      ? `The next message continues ${parent}`
      : "One WebSocket connection. Each message continues the last response.";
};

const say = (kind, text) => {
  const box = $("transcript");
  const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  const bubble = h("div", { class: `say ${kind}` }, text);
  box.append(bubble);
  if (isAtEnd) box.scrollTop = box.scrollHeight;
  return bubble;
};

const foot = (text) => {
  $("transcript").append(h("div", { class: "foot" }, text));
  $("transcript").scrollTop = 1e9;
};

const detail = (event) =>
  event.delta ??
  event.error?.message ??
  event.steer?.id ??
  event.item?.type ??
  event.response?.id ??
  event.reason ??
  "";

// Rows are added once per animation frame: a fast model must not freeze the page. Surplus rows are only counted.
const list = painter(() => {
  const box = $("events");
  const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  const skipped = Math.max(0, waiting.length - EVENTS_MAX);
  const rows = waiting
    .slice(skipped)
    .map(([ms, kind, name, text]) =>
      h(
        "li",
        { class: kind },
        h("time", {}, took(ms)),
        h("span", { class: "name" }, name),
        h("span", { class: "detail" }, text),
      ),
    );
  waiting = [];
  box.append(...rows);
  while (box.children.length > EVENTS_MAX) box.firstElementChild.remove();
  $("play-count").textContent =
    `${seen} frames${seen > EVENTS_MAX ? `, showing the last ${EVENTS_MAX}` : ""}`;
  if (isAtEnd) box.scrollTop = box.scrollHeight;
});

const note = (kind, name, text) => {
  seen += 1;
  waiting.push([performance.now() - began, kind, name, String(text).slice(0, 300)]);
  list();
};

const kindOf = (type) =>
  type === "error" || type === "response.failed"
    ? "fault"
    : type.startsWith("response.steer")
      ? "steer"
      : TERMINAL.has(type)
        ? "end"
        : "";

// What the model writes is Markdown; it is drawn again once per animation frame while it grows.
const write = painter(() => {
  const box = $("transcript");
  const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  for (const one of bubbles.values())
    if (one.isStale) {
      showMarkdown(one.box, one.text);
      one.isStale = false;
    }
  if (isAtEnd) box.scrollTop = box.scrollHeight;
});

const speak = (event, kind) => {
  const id = `${event.item_id}/${event.content_index ?? event.summary_index ?? 0}`;
  if (!bubbles.has(id)) bubbles.set(id, { box: say(`${kind} markdown`, ""), text: "" });
  const bubble = bubbles.get(id);
  bubble.text += event.delta;
  bubble.isStale = true;
  write();
};

const heard = (event) => {
  note(kindOf(event.type), event.type, detail(event));
  switch (event.type) {
    case "response.created":
      running = event.response.id;
      break;
    case "response.output_text.delta":
    case "response.refusal.delta":
      speak(event, "model");
      break;
    case "response.reasoning_text.delta":
    case "response.reasoning_summary_text.delta":
      speak(event, "thought");
      break;
    case "response.output_item.done":
      if (event.item.type.endsWith("_call"))
        say("call", `${event.item.name}(${event.item.arguments ?? event.item.input ?? ""})`);
      break;
    case "error":
      say("fault", event.error?.message ?? "error");
      running = null;
      break;
    case "response.steer.failed":
      say("fault", `Steer failed: ${event.error?.message ?? event.error?.code ?? "unknown error"}`);
      break;
    case "response.failed":
      say("fault", event.response.error?.message ?? "failed");
      running = null;
      break;
    case "response.completed":
    case "response.incomplete": {
      const { usage, id, incomplete_details: why } = event.response;
      parent = id;
      running = null;
      const cached = usage?.input_tokens_details?.cached_tokens ?? 0;
      const tokens = `${usage?.input_tokens ?? 0} in (${cached} cached), ${usage?.output_tokens ?? 0} out`;
      foot([short(id), took(performance.now() - began), tokens, ...(why ? [why.reason] : [])].join(" · "));
    }
  }
  buttons();
};

const connected = () => {
  if (socket && socket.readyState <= WebSocket.OPEN) return Promise.resolve(socket);
  const fresh = (socket = openSocket());
  fresh.onmessage = ({ data }) => heard(JSON.parse(data));
  fresh.onclose = ({ code, reason }) => {
    note("fault", "connection closed", `${code} ${reason}`);
    if (running && socket === fresh) {
      running = null;
      foot("connection closed");
    }
    if (socket === fresh) socket = null;
    buttons();
  };
  return new Promise((resolve, reject) => {
    fresh.onopen = () => resolve(fresh);
    fresh.onerror = () => reject(new Error("The WebSocket connection could not be opened."));
  });
};

const send = async (frame) => {
  try {
    const open = await connected();
    const text = JSON.stringify(frame);
    note("up", `↑ ${frame.type}`, `${text.length} bytes`);
    open.send(text);
  } catch (error) {
    say("fault", error.message);
    running = null;
    buttons();
  }
};

const submit = () => {
  const fields = form();
  const text = fields.get("text").trim();
  if (!text) return;
  began = performance.now();
  say("user", text);
  $("play-form").elements.text.value = "";
  const lane = fields.get("lane").trim();
  const instructions = fields.get("instructions").trim();
  send({
    type: "response.create",
    model: fields.get("model"),
    input: text,
    store: fields.has("store"),
    max_output_tokens: Number(fields.get("output")),
    ...(parent ? { previous_response_id: parent } : {}),
    ...(lane ? { stream_id: lane } : {}),
    ...(instructions ? { instructions } : {}),
  });
};

const steer = () => {
  const text = form().get("text").trim();
  if (!text || !running) return;
  say("steer", text);
  $("play-form").elements.text.value = "";
  send({ type: "response.steer", previous_response_id: running, input: text });
};

export const startPlay = () => {
  touch.addEventListener("change", hint);
  hint();
  $("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("play-form").elements.text.addEventListener("keydown", (event) => {
    // A key that ends the composition of a word (Chinese, Japanese, Korean) does not send it.
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    if (event.ctrlKey || event.metaKey || !touch.matches) {
      event.preventDefault();
      (running ? steer : submit)();
    }
  });
  $("play-steer").addEventListener("click", steer);
  $("play-stop").addEventListener("click", () => socket?.close(1000));
  $("play-clear").addEventListener("click", () => {
    $("events").replaceChildren();
    seen = 0;
    list();
  });
  $("play-new").addEventListener("click", () => {
    parent = null;
    bubbles.clear();
    $("transcript").replaceChildren();
    buttons();
    $("play-form").elements.text.focus();
  });
};
