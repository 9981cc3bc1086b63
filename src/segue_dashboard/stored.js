// Which conversations are stored, and where was something said? The caller's own, a page at a time.

import { askJson } from "./api.js";
import { $, count, h } from "./dom.js";

// A person stops typing before the search goes out.
const TYPED_MS = 300;

let open = () => {};
let asked = 0;

const when = (seconds) => {
  const at = new Date(seconds * 1000);
  const day = at.toLocaleDateString("en-CA");
  return [day === new Date().toLocaleDateString("en-CA") ? "today" : day, at.toLocaleTimeString("en-GB")];
};

const row = (one) => {
  const [day, time] = when(one.created_at);
  const read = (event) => {
    event.preventDefault();
    open(one.id);
  };
  return h(
    "li",
    {},
    h(
      "a",
      { href: "#stored", class: "stored", onclick: read, title: one.id },
      h("span", { class: "at" }, h("span", {}, day), h("span", {}, time)),
      h(
        "span",
        { class: "said" },
        h("strong", {}, one.question || "(no question)"),
        h("span", {}, one.answer || `(${one.status})`),
      ),
      h(
        "span",
        { class: "of" },
        h("span", {}, one.model),
        h(
          "span",
          { class: one.status === "completed" ? "" : "bad" },
          one.status === "completed" ? `${count(one.input_tokens + one.output_tokens)} tokens` : one.status,
        ),
      ),
    ),
  );
};

const words = () => $("stored-form").elements.q.value.trim();

const load = async (before = null) => {
  const ask = (asked += 1);
  const [list, more] = [$("stored-rows"), $("stored-more")];
  const query = new URLSearchParams({ ...(words() ? { q: words() } : {}), ...(before ? { before } : {}) });
  more.disabled = true;
  try {
    const page = await askJson(`/dashboard/stored?${query}`);
    // A later search has overtaken this one.
    if (ask !== asked) return;
    if (!before) list.replaceChildren();
    list.append(...page.data.map(row));
    more.hidden = !page.next;
    more.textContent = words() ? "Search further back" : "Older conversations";
    more.onclick = () => load(page.next);
    const nothing = words() ? (page.next ? "Nothing found so far." : "Nothing found.") : "Nothing is stored yet.";
    $("stored-sub").textContent = list.children.length ? "" : nothing;
  } catch (error) {
    if (ask === asked) $("stored-sub").textContent = error.message;
  } finally {
    more.disabled = false;
  }
};

export const loadStored = () => load();

// Called with the id of the response that is to be read.
export const startStored = (openReader) => {
  open = openReader;
  let timer = 0;
  $("stored-form").addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  $("stored-form").elements.q.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(load, TYPED_MS);
  });
};
