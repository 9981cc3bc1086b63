// What is in a conversation? Read through the public API, as any client would, from the newest turn back.

import { askJson } from "./api.js";
import { $, h } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const AT_ONCE = 8;
const ITEMS_MAX = 100;

const words = (content) =>
  typeof content === "string"
    ? content
    : (content ?? []).map((part) => part.text ?? part.refusal ?? `[${part.type}]`).join("\n");

const shown = (item) => {
  switch (item.type) {
    case "message":
      return [
        item.role === "assistant" ? "assistant" : item.role === "user" ? "user" : "system",
        item.role,
        words(item.content),
      ];
    case "reasoning":
      return ["thought", "reasoning", words(item.content) || words(item.summary)];
    case "function_call":
      return ["tool", `calls ${item.name}`, item.arguments];
    case "custom_tool_call":
      return ["tool", `calls ${item.name}`, item.input];
    case "function_call_output":
    case "custom_tool_call_output":
      return ["tool", "tool output", words(item.output)];
    default:
      return ["tool", item.type, JSON.stringify(item, null, 1)];
  }
};

const line = (item) => {
  const [kind, title, text] = shown(item);
  if (kind === "assistant") {
    const box = h("div", { class: "markdown" });
    showMarkdown(box, text);
    return h("div", { class: `item ${kind}` }, h("h3", {}, title), box);
  }
  return h("div", { class: `item ${kind}` }, h("h3", {}, title), h("pre", {}, text));
};

const turn = async (id) => {
  const name = encodeURIComponent(id);
  const [response, given] = await Promise.all([
    askJson(`/v1/responses/${name}`),
    askJson(`/v1/responses/${name}/input_items?order=asc&limit=${ITEMS_MAX}`),
  ]);
  return {
    response,
    parts: [
      h("div", { class: "cut-here" }, `${id} · ${response.status}`),
      ...given.data.map(line),
      given.has_more ? h("p", { class: "sub" }, "There are more input items; they are not shown.") : null,
      ...response.output.map(line),
    ].filter(Boolean),
  };
};

export const openReader = async (id) => {
  const [dialog, box] = [$("reader"), $("reader-items")];
  $("reader-sub").textContent = id;
  box.replaceChildren(h("p", { class: "empty" }, "Loading…"));
  if (!dialog.open) dialog.showModal();
  const opened = (dialog.dataset.id = id);
  const more = async (from) => {
    const found = [];
    let next = from;
    try {
      for (let at = 0; at < AT_ONCE && next; at += 1) {
        const one = await turn(next);
        found.unshift(...one.parts);
        next = one.response.previous_response_id;
      }
    } catch (error) {
      const text =
        error.status === 404
          ? found.length
            ? "Earlier responses are not stored."
            : "This response is not stored (store: false), or was deleted."
          : error.message;
      found.unshift(h("p", { class: "empty" }, text));
      next = null;
    }
    if (dialog.dataset.id !== opened) return;
    box.querySelector(":scope > .empty, :scope > button")?.remove();
    const height = box.scrollHeight;
    if (next) found.unshift(h("button", { type: "button", onclick: () => more(next) }, "Earlier turns"));
    box.prepend(...found);
    box.scrollTop = from === id ? box.scrollHeight : box.scrollHeight - height;
  };
  await more(id);
};
