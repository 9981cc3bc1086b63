// Which API keys are there, what may each use, and what has it used? For operators.

import { askJson, setKey } from "./api.js";
import { $, age, copyText, count, h } from "./dom.js";

const PLACE = "/dashboard/keys";
const RENEW_MS = 10000;
const DAY_S = 86400;
// Name, words for a person, unit.
const LIMITS = [
  ["requests_per_min", "Requests per minute", "req/min"],
  ["tokens_per_min", "Tokens per minute, input and output", "tokens/min"],
  ["connections_max", "Open WebSocket connections", "connections"],
  ["lanes_max", "Responses that run at once", "at once"],
  ["state_bytes_max", "Bytes of history in memory", "bytes"],
  ["other_requests_per_min", "Other requests per minute (GET, DELETE, lists)", "other req/min"],
];
const BUDGETS = [
  ["budget_tokens_day", "Budget: tokens a day (UTC)"],
  ["budget_tokens_month", "Budget: tokens a month (UTC)"],
  ["owner_budget_tokens_day", "Budget of the owner: tokens a day, of all its keys"],
  ["owner_budget_tokens_month", "Budget of the owner: tokens a month, of all its keys"],
];
// From here on a budget is shown as nearly used.
const WARNED_SHARE = 0.8;
const EXPIRIES = [
  ["never", 0],
  ["in 7 days", 7],
  ["in 30 days", 30],
  ["in 90 days", 90],
  ["in a year", 365],
];
const OPERATOR_SCOPES = ["responses", "models", "dashboard", "operator"];

let known = null;
let showsRevoked = false;
// Called with the secret that the page is to use from now on.
let useKey = () => {};

const day = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 10);
// The day says too little of what ends soon.
const end = (seconds) => {
  const left_ms = seconds * 1000 - Date.now();
  return left_ms < 2 * DAY_S * 1000 ? `in ${age(left_ms)}` : day(seconds);
};
const stateOf = (key) =>
  key.revoked_at ? "revoked" : key.expires_at && key.expires_at * 1000 <= Date.now() ? "expired" : "valid";
const limitsOf = (key) => [
  ...(key.limits.models.length ? [`models ${key.limits.models.join(", ")}`] : []),
  ...LIMITS.filter(([name]) => key.limits[name]).map(([name, , unit]) => `${count(key.limits[name])} ${unit}`),
];

const change = (path, method, body) =>
  askJson(path, {
    method,
    headers: { "content-type": "application/json" },
    ...(body ? { body: JSON.stringify(body) } : {}),
  });

// --- the list ---

const usageOf = (owner) => {
  const rows = known.usage.filter((one) => one.owner === owner);
  const sum = (name) => rows.reduce((total, one) => total + one[name], 0);
  return { turns: sum("turns"), input: sum("input_tokens"), output: sum("output_tokens") };
};

const cell = (label, ...content) => h("td", { "data-label": label }, ...content);

const row = (key) => {
  const state = stateOf(key);
  const used = usageOf(key.owner);
  const shares = known.keys.filter((one) => one.owner === key.owner && stateOf(one) === "valid").length > 1;
  const limits = limitsOf(key);
  return h(
    "tr",
    { class: state, "data-id": key.id },
    cell("key", h("b", {}, key.name), key.id === known.key_id ? h("span", { class: "tag" }, "this page") : null,
      h("small", { class: "mono" }, key.id), key.secret_start ? h("small", { class: "mono" }, `${key.secret_start}…`) : null),
    cell("owner", key.owner),
    cell("scopes", key.scopes.join(", ")),
    cell("limits", limits.length ? limits.map((one) => h("div", {}, one)) : h("span", { class: "sub" }, "none")),
    cell("created", day(key.created_at)),
    cell("last used", key.used_at ? `${age(Date.now() - key.used_at * 1000)} ago` : "–"),
    cell("expires", state === "valid" ? (key.expires_at ? end(key.expires_at) : "never") : h("span", { class: "bad" }, state)),
    cell("today", `${count(used.turns)} turns`, h("small", {}, `${count(used.input)} in · ${count(used.output)} out`),
      shares ? h("small", {}, "all keys of this owner") : null,
      ...(known.budgets[key.id] ?? []).map(budgetBar)),
    h(
      "td",
      { class: "actions" },
      state === "revoked"
        ? null
        : [
            h("button", { type: "button", class: "quiet", onclick: () => openLimits(key) }, "Limits"),
            h("button", { type: "button", class: "quiet bad", onclick: () => openRevoke(key) }, "Revoke"),
          ],
    ),
  );
};

// What is used of a budget, as a bar.
const budgetBar = (one) => {
  const share = Math.min(1, one.used / one.tokens_max);
  const words = `${count(one.used)} of ${count(one.tokens_max)} tokens this ${one.period}${one.of === "owner" ? ", all keys of the owner" : ""}`;
  const state = share >= 1 ? "full" : share >= WARNED_SHARE ? "near" : "";
  return h("div", { class: `budget ${state}` },
    h("progress", { max: one.tokens_max, value: Math.min(one.used, one.tokens_max), "aria-label": words }),
    h("small", {}, words),
  );
};

const HEAD = ["key", "owner", "scopes", "limits", "created", "last used", "expires", "used today (UTC)", ""];

const draw = () => {
  const valid = known.keys.filter((one) => stateOf(one) === "valid").length;
  const gone = known.keys.filter((one) => stateOf(one) === "revoked").length;
  $("keys-sub").textContent = `${valid} valid · ${gone} revoked`;
  $("keys-open").hidden = known.are_required;
  $("keys-open").textContent = valid
    ? "This server requires no key (auth = off): every program on this machine may use it. The keys have no effect."
    : "No key is required yet: every program on this machine may use the server. The first key closes it to all requests without a key. This page then uses the new key.";
  $("keys-all").closest("label").hidden = !gone;
  const shown = known.keys.filter((one) => showsRevoked || stateOf(one) !== "revoked");
  $("keys-rows").replaceChildren(
    shown.length
      ? h(
          "table",
          {},
          h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, shown.map(row)),
        )
      : h("p", { class: "empty" }, "No keys yet."),
  );
};

export const loadKeys = async () => {
  try {
    known = await askJson(PLACE);
    draw();
  } catch (error) {
    $("keys-rows").replaceChildren(h("p", { class: "wrong" }, error.message));
  }
};

// --- dialogs ---

// One dialog; `act` returns what to show next, or nothing to close it.
const open = (title, content, action, act, kind = "main") => {
  const [dialog, form] = [$("key-dialog"), $("key-form")];
  const wrong = h("p", { class: "wrong", role: "alert", hidden: true });
  const button = h("button", { type: "submit", class: kind }, action);
  const cancel = h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel");
  form.replaceChildren(
    h("h2", { id: "key-title" }, title),
    ...content,
    wrong,
    h("div", { class: "fields" }, h("span", { class: "grow" }), act ? cancel : null, button),
  );
  form.onsubmit = async (event) => {
    event.preventDefault();
    if (!act) return dialog.close();
    button.disabled = true;
    try {
      await act(form);
    } catch (error) {
      wrong.textContent = error.message;
      wrong.hidden = false;
      button.disabled = false;
    }
  };
  if (!dialog.open) dialog.showModal();
};

const limitFields = (limits) =>
  h(
    "fieldset",
    {},
    h("legend", {}, "Limits (empty: none)"),
    h("label", {}, "Models, by names or patterns such as gpt-*, separated by commas", h("input", {
      name: "models",
      autocomplete: "off",
      value: (limits.models ?? []).join(", ") || null,
      placeholder: "all",
    })),
    [...LIMITS, ...BUDGETS].map(([name, words]) =>
      h(
        "label",
        {},
        words,
        h("input", {
          name,
          type: "number",
          min: 1,
          step: 1,
          inputmode: "numeric",
          value: limits[name] || null,
          placeholder: name === "other_requests_per_min" ? String(known.other_requests_per_min) : "none",
        }),
      ),
    ),
  );

const readLimits = (form) => ({
  ...Object.fromEntries([...LIMITS, ...BUDGETS].map(([name]) => [name, Number(form.elements[name].value || 0)])),
  models: form.elements.models.value.split(",").map((name) => name.trim()).filter(Boolean),
});

const openCreate = () => {
  const isFirst = !known.are_required;
  const chosen = isFirst ? OPERATOR_SCOPES : known.usual_scopes;
  const field = (label, attributes) => h("label", {}, label, h("input", { autocomplete: "off", ...attributes }));
  open(
    isFirst ? "Create the first key" : "Create a key",
    [
      field("Name", { name: "name", required: true, maxlength: 100, autofocus: true }),
      field("Owner: keys of one owner see each other's responses", {
        name: "owner",
        maxlength: 100,
        placeholder: "same as the name",
      }),
      h(
        "fieldset",
        { class: "checks" },
        h("legend", {}, "Scopes"),
        known.scopes.map((name) =>
          h(
            "label",
            { class: "check" },
            h("input", { type: "checkbox", name: "scopes", value: name, checked: chosen.includes(name) }),
            name,
          ),
        ),
      ),
      isFirst
        ? h("p", { class: "sub" }, `Keep dashboard and operator, or this page cannot be used any more. The owner '${known.owner}' goes on with the responses made so far.`)
        : null,
      h(
        "label",
        {},
        "Expires",
        h("select", { name: "expires" }, EXPIRIES.map(([words, days]) => h("option", { value: days }, words))),
      ),
      limitFields({}),
    ].filter(Boolean),
    "Create",
    async (form) => {
      const days = Number(form.elements.expires.value);
      const { key, secret } = await change(PLACE, "POST", {
        name: form.elements.name.value.trim(),
        owner: form.elements.owner.value.trim() || null,
        scopes: [...form.querySelectorAll("[name=scopes]:checked")].map((one) => one.value),
        limits: readLimits(form),
        expires_at: days ? Math.floor(Date.now() / 1000) + days * DAY_S : null,
      });
      showSecret(key, secret);
      if (isFirst && key.scopes.includes("operator")) useKey(secret);
      else loadKeys();
    },
  );
};

const showSecret = (key, secret) => {
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  button.onclick = async () => {
    button.textContent = (await copyText(secret)) ? "Copied" : "Not copied: select it";
  };
  open(
    `The key '${key.name}'`,
    [
      h("p", {}, "This is the only time that the key is shown. Store it somewhere safe."),
      h("div", { class: "secret" }, h("code", { id: "key-secret" }, secret), button),
      h("p", { class: "sub" }, `${key.id}, owner ${key.owner}`),
    ],
    "Done",
    null,
  );
};

const openLimits = (key) =>
  open(`Limits of '${key.name}'`, [limitFields(key.limits)], "Save", async (form) => {
    await change(`${PLACE}/${encodeURIComponent(key.id)}`, "POST", readLimits(form));
    $("key-dialog").close();
    await loadKeys();
  });

const openRevoke = (key) =>
  open(
    `Revoke '${key.name}'?`,
    [
      h("p", {}, `${key.id}, owner ${key.owner}. Its clients are refused at once. This cannot be undone.`),
      key.id === known.key_id
        ? h("p", { class: "wrong" }, "This page uses this key. You will be asked for another one.")
        : null,
    ].filter(Boolean),
    "Revoke",
    async () => {
      await change(`${PLACE}/${encodeURIComponent(key.id)}`, "DELETE");
      $("key-dialog").close();
      await loadKeys();
    },
    "danger",
  );

export const startKeys = (onKey) => {
  useKey = (secret) => {
    setKey(secret);
    onKey();
  };
  $("keys-new").addEventListener("click", () => known && openCreate());
  $("keys-all").addEventListener("change", (event) => {
    showsRevoked = event.target.checked;
    draw();
  });
  setInterval(() => {
    if (known && !document.hidden && !$("keys-view").hidden && !$("key-dialog").open) loadKeys();
  }, RENEW_MS);
};
