// What can be asked of this server? Every operation of /openapi.json, its schemas, and a form that sends it.

import { askJson, eventsOf, hasKey, openSocket, send, setKey } from "./api.js";
import { $, h, took } from "./dom.js";
import { startTheme } from "./theme.js";

// Lines of an answer that are shown; an endless stream keeps its newest.
const LINES_MAX = 2000;
const GROUPS = [
  ["Responses", /^\/v1\/responses/],
  ["Conversations", /^\/v1\/conversations/],
  ["Messages", /^\/v1\/messages/],
  ["Chat Completions", /^\/v1\/chat/],
  ["Files", /^\/v1\/files/],
  ["Containers and skills", /^\/v1\/(containers|skills)/],
  ["Models", /^\/v1\/(models|completions|embeddings)/],
  ["Server", /./],
];
const message = { type: "message", role: "user", content: "Hello" };
const asked = { role: "user", content: "Say hello." };
// By path; `model` is the first that is served.
const EXAMPLES = {
  "/v1/responses": { model: "", input: "Say hello.", stream: true },
  "/v1/responses/compact": { model: "", input: [message] },
  "/v1/responses/input_tokens": { model: "", input: "How many tokens are this?" },
  "/v1/conversations": { metadata: { topic: "demo" } },
  "/v1/conversations/{id}": { metadata: { topic: "another" } },
  "/v1/conversations/{id}/items": { items: [message] },
  "/v1/messages": { model: "", max_tokens: 64, messages: [asked], stream: true },
  "/v1/messages/count_tokens": { model: "", messages: [asked] },
  "/v1/chat/completions": { model: "", messages: [asked], stream: true },
};
const SOCKET = { type: "response.create", model: "", input: "Say hello." };

let described = {};
let models = [];

const example = (value) => {
  const body = "model" in value ? { ...value, model: models[0] ?? "" } : value;
  return JSON.stringify(body, null, 2);
};

// Text with names between backticks.
const words = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

// --- schemas ---

const resolved = (schema) =>
  schema.$ref
    ? schema.$ref
        .slice(2)
        .split("/")
        .reduce((at, name) => at[name], described)
    : schema;

const nameOf = (schema) => schema.$ref?.split("/").pop();

const typeOf = (schema) => {
  if (schema.$ref) return nameOf(schema);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  return schema.type === "array" ? `array of ${typeOf(schema.items ?? {})}` : (schema.type ?? "any");
};

// Schemas with properties of their own inside this one: opened on demand, because they contain each other.
const inner = (schema) => {
  if (schema.$ref) return [schema];
  return [...(schema.anyOf ?? schema.oneOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(inner);
};

const opened = (label, draw) => {
  const box = h("details", {}, h("summary", {}, label));
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(draw()));
  return box;
};

const limits = (schema) => {
  const plain = (schema.anyOf ?? [schema]).find((one) => one.type !== "null") ?? {};
  const words = [];
  if (plain.minimum !== undefined && Math.abs(plain.minimum) < 1e9) words.push(`≥ ${plain.minimum}`);
  if (plain.maximum !== undefined && plain.maximum < 1e9) words.push(`≤ ${plain.maximum}`);
  if (plain.maxLength !== undefined) words.push(`at most ${plain.maxLength} characters`);
  if (schema.default !== undefined && schema.default !== null) words.push(`default ${JSON.stringify(schema.default)}`);
  return words.length ? ` (${words.join(", ")})` : "";
};

const properties = (reference) => {
  const schema = resolved(reference);
  const rows = Object.entries(schema.properties ?? {}).flatMap(([name, one]) => [
    h("dt", {}, name, schema.required?.includes(name) ? " *" : ""),
    h(
      "dd",
      {},
      typeOf(one),
      limits(one),
      one.description ? words(` ${one.description}`) : null,
      inner(one).map((part) => h("div", {}, opened(nameOf(part), () => properties(part)))),
    ),
  ]);
  const variants = inner({ anyOf: schema.anyOf ?? schema.oneOf ?? [] });
  return h(
    "div",
    {},
    schema.description ? h("p", { class: "sub" }, words(schema.description)) : null,
    rows.length ? h("dl", { class: "schema" }, rows) : null,
    variants.map((part) => opened(nameOf(part), () => properties(part))),
    rows.length || variants.length ? null : h("code", {}, typeOf(schema)),
  );
};

const schemaOf = (label, content) => {
  const schema = Object.values(content ?? {})[0]?.schema;
  return schema ? opened(`${label}: ${typeOf(schema)}`, () => properties(schema)) : null;
};

// --- trying it ---

class Answer {
  constructor() {
    this.status = h("p", { class: "status", role: "status" });
    this.text = h("pre", { class: "answer", tabindex: 0, hidden: true });
    this.lines = [];
  }

  begin() {
    this.lines = [];
    this.text.hidden = true;
    this.began = performance.now();
    this.tell("", "waiting");
  }

  tell(kind, head, ...rest) {
    this.status.dataset.kind = kind;
    this.status.replaceChildren(h("b", {}, head), ...rest);
  }

  add(text) {
    this.lines.push(text);
    if (this.lines.length > LINES_MAX) this.lines.shift();
    this.text.hidden = false;
    this.text.textContent = this.lines.join("\n");
    this.text.scrollTop = this.lines.length > 1 ? this.text.scrollHeight : 0;
  }
}

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

const show = async (answer, box) => {
  const tell = () =>
    box.tell(
      answer.ok ? "good" : "bad",
      `${answer.status} ${answer.statusText}`,
      ` after ${took(performance.now() - box.began)}, ${answer.headers.get("x-request-id") ?? "no request id"}`,
    );
  tell();
  if (answer.headers.get("content-type")?.startsWith("text/event-stream"))
    for await (const data of eventsOf(answer)) box.add(data);
  else box.add(pretty(await answer.text()));
  tell();
};

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const curlOf = (method, path, body) =>
  [
    `curl -N ${shell(location.origin + path)}${method === "get" ? "" : ` -X ${method.toUpperCase()}`}`,
    hasKey() ? `  -H "Authorization: Bearer $SEGUE_KEY"` : null,
    body ? `  -H 'content-type: application/json' -d ${shell(body)}` : null,
  ]
    .filter(Boolean)
    .join(" \\\n");

const pathOf = (path, operation, form) => {
  const query = new URLSearchParams();
  let filled = path;
  for (const { name, in: place } of operation.parameters ?? []) {
    const value = form.elements[name].value.trim();
    if (place === "path") filled = filled.replace(`{${name}}`, encodeURIComponent(value));
    else if (value) query.set(name, value);
  }
  return query.size ? `${filled}?${query}` : filled;
};

const field = ({ name, required, schema, description }) => {
  const choices = schema.enum ?? (schema.type === "boolean" ? ["false", "true"] : null);
  const attributes = { name, required, title: description ?? "", autocomplete: "off" };
  const input = choices
    ? h("select", attributes, ["", ...choices].map((one) => h("option", { value: one }, one)))
    : h("input", { ...attributes, placeholder: String(schema.default ?? "") });
  return h("label", {}, required ? `${name} *` : name, input);
};

const form = (method, path, operation) => {
  const box = new Answer();
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const curl = h("pre", { class: "curl", hidden: true, tabindex: 0 });
  const text = EXAMPLES[path] && operation.requestBody ? example(EXAMPLES[path]) : "{}";
  const body = operation.requestBody
    ? h("textarea", { name: "body", rows: text.split("\n").length + 1, spellcheck: "false", "aria-label": "Request body" })
    : null;
  if (body) body.value = text;
  const node = h(
    "form",
    { class: "inside" },
    operation.parameters?.length ? h("div", { class: "fields" }, operation.parameters.map(field)) : null,
    body,
    h(
      "div",
      { class: "fields" },
      h("button", { class: "main", type: "submit" }, "Send"),
      stop,
      h("button", { class: "quiet", type: "button", onclick: () => showCurl() }, "curl"),
    ),
    curl,
    box.status,
    box.text,
    schemaOf("Request", operation.requestBody?.content),
    schemaOf("Answer", operation.responses["200"]?.content),
  );
  const showCurl = () => {
    curl.textContent = curlOf(method, pathOf(path, operation, node), body?.value);
    curl.hidden = !curl.hidden;
  };
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    const leaving = new AbortController();
    stop.disabled = false;
    stop.onclick = () => leaving.abort();
    box.begin();
    try {
      const headers = body ? { "content-type": "application/json" } : {};
      const options = { method: method.toUpperCase(), headers, body: body?.value, signal: leaving.signal };
      await show(await send(pathOf(path, operation, node), options), box);
    } catch (error) {
      box.tell("bad", leaving.signal.aborted ? "stopped" : `no answer: ${error.message}`);
    }
    stop.disabled = true;
  });
  return node;
};

const socketForm = () => {
  const box = new Answer();
  const body = h("textarea", { name: "body", rows: 6, spellcheck: "false", "aria-label": "Frame" });
  body.value = example(SOCKET);
  const close = h("button", { type: "button", disabled: true }, "Close");
  let socket = null;
  const connect = () => {
    socket = openSocket();
    box.begin();
    box.tell("", "connecting");
    socket.onmessage = ({ data }) => box.add(data);
    socket.onclose = ({ code, reason }) => {
      box.tell("", `closed with ${code}`, reason ? ` ${reason}` : "");
      close.disabled = true;
      socket = null;
    };
    close.onclick = () => socket?.close();
    close.disabled = false;
    return new Promise((resolve) => {
      socket.onopen = () => {
        box.tell("good", "connected", ": continue with previous_response_id");
        resolve();
      };
    });
  };
  const node = h(
    "form",
    { class: "inside" },
    body,
    h("div", { class: "fields" }, h("button", { class: "main", type: "submit" }, "Send"), close),
    box.status,
    box.text,
  );
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!socket) await connect();
    socket?.send(body.value);
  });
  return node;
};

// --- the page ---

const entry = (method, path, summary, draw) => {
  const id = `${method}${path.replace(/[^a-z]+/gi, "-")}`.replace(/-$/, "");
  const box = h(
    "details",
    { class: "operation", id, "data-words": `${method} ${path} ${summary}`.toLowerCase() },
    h(
      "summary",
      {},
      h("span", { class: "method", "data-method": method }, method === "socket" ? "WS" : method.toUpperCase()),
      h("span", { class: "path" }, path),
      h("span", { class: "sub" }, words(summary)),
    ),
  );
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(draw());
    if (box.open) history.replaceState(null, "", `#${id}`);
  });
  return box;
};

const draw = () => {
  const left = new Map(Object.entries(described.paths));
  const sections = GROUPS.map(([title, pattern]) => {
    const entries = [];
    for (const [path, methods] of left) {
      if (!pattern.test(path)) continue;
      left.delete(path);
      for (const [method, operation] of Object.entries(methods))
        entries.push(entry(method, path, operation.summary, () => form(method, path, operation)));
    }
    if (title === "Responses")
      entries.push(entry("socket", "/v1/responses", "Turns over a WebSocket: one frame in, events out.", socketForm));
    return h("section", {}, h("h2", {}, title), entries);
  });
  $("operations").replaceChildren(...sections);
};

const filter = () => {
  const words = $("filter").value.toLowerCase().split(" ").filter(Boolean);
  let shown = 0;
  for (const section of $("operations").children) {
    const entries = [...section.querySelectorAll(".operation")];
    for (const one of entries) one.hidden = !words.every((word) => one.dataset.words.includes(word));
    section.hidden = entries.every((one) => one.hidden);
    shown += entries.filter((one) => !one.hidden).length;
  }
  $("none").hidden = shown > 0;
};

const loadModels = async () => {
  models = (await askJson("/v1/models").catch(() => ({ data: [] }))).data.map((one) => one.id);
};

const start = async () => {
  try {
    described = await askJson("/openapi.json");
  } catch (error) {
    $("banner").textContent = `/openapi.json cannot be read: ${error.message}`;
    $("banner").hidden = false;
    return;
  }
  await loadModels();
  $("version").textContent = described.info.version;
  $("base").textContent = `${location.origin}/v1`;
  draw();
  const wanted = location.hash && document.getElementById(location.hash.slice(1));
  if (wanted) {
    wanted.open = true;
    wanted.scrollIntoView();
  }
};

$("filter").addEventListener("input", filter);
$("key").addEventListener("click", () => $("ask").showModal());
$("ask-form").addEventListener("submit", (event) => {
  setKey(event.target.elements.key.value.trim());
  start();
});
startTheme();
start();
