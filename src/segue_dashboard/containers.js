// Which containers does the caller have, what do they use, and which files are in them? Asked of `/v1/containers`, where
// the server has sandboxes and the key may use them; elsewhere the card is not there.

import { askJson, send } from "./api.js";
import { $, age, bytes, h } from "./dom.js";

const PLACE = "/v1/containers";
const RENEW_MS = 5000;
const FILES_MAX = 20;

let timer = 0;
// The container whose files are shown, and these files.
let opened = "";
let files = [];

const cell = (label, ...content) => h("td", { "data-label": label }, ...content);

const network = ({ network_policy: policy, usage }) =>
  policy.type === "disabled"
    ? h("span", { class: "sub" }, "off")
    : [
        h("div", {}, policy.allowed_domains.join(", ")),
        h("small", {}, `${bytes(usage.sent_bytes)} out \u00b7 ${bytes(usage.received_bytes)} in`),
      ];

const download = async (container, file) => {
  const answer = await send(`${PLACE}/${container}/files/${file.id}/content`);
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: file.path.split("/").at(-1) });
  link.click();
  URL.revokeObjectURL(link.href);
};

const list = (container) =>
  h(
    "tr",
    { class: "files" },
    h(
      "td",
      { colspan: 7 },
      files.length
        ? h(
            "ul",
            {},
            files.map((file) =>
              h(
                "li",
                {},
                h("button", { type: "button", class: "quiet mono", onclick: () => download(container, file) }, file.path),
                h("small", {}, `${bytes(file.bytes)}${file.source === "user" ? " \u00b7 uploaded" : ""}`),
              ),
            ),
          )
        : h("span", { class: "sub" }, "No files in /mnt/data."),
    ),
  );

const row = (one) => [
  h(
    "tr",
    { class: one.status, "data-id": one.id },
    cell("container", h("b", {}, one.name || "made by a turn"), h("small", { class: "mono" }, one.id)),
    cell("isolation", one.isolation, h("small", {}, `limits by ${one.limits_by}`)),
    cell("age", age(Date.now() - one.created_at * 1000), h("small", {}, `used ${age(Date.now() - one.last_active_at * 1000)} ago`)),
    cell("memory", one.status === "active" ? `${bytes(one.usage.memory_bytes)} of ${one.memory_limit}` : one.status),
    cell("CPU", `${one.usage.cpu_s.toFixed(1)} s`),
    cell("network", network(one)),
    h(
      "td",
      { class: "actions" },
      one.status === "active"
        ? h(
            "button",
            { type: "button", class: "quiet", "aria-expanded": opened === one.id, onclick: () => toggle(one.id) },
            "Files",
          )
        : null,
    ),
  ),
  opened === one.id ? list(one.id) : null,
];

const HEAD = ["container", "isolation", "age", "memory", "CPU", "network", ""];

const draw = (rows) => {
  const active = rows.filter((one) => one.status === "active").length;
  $("containers-sub").textContent = `${active} active \u00b7 ${rows.length - active} ended`;
  $("containers").replaceChildren(
    rows.length
      ? h(
          "table",
          {},
          h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, rows.flatMap(row)),
        )
      : h("p", { class: "empty" }, "No containers."),
  );
};

const renew = async () => {
  clearTimeout(timer);
  if (document.hidden || $("live-view").hidden) return;
  try {
    draw((await askJson(`${PLACE}?limit=50`)).data);
    $("containers-card").hidden = false;
    timer = setTimeout(renew, RENEW_MS);
  } catch {
    // No sandboxes here, or a key that may not see them.
    $("containers-card").hidden = true;
  }
};

// Asking for its files keeps a container alive; so they are asked for when a person wants to see them, once.
const toggle = async (id) => {
  opened = opened === id ? "" : id;
  files = opened ? (await askJson(`${PLACE}/${id}/files?limit=${FILES_MAX}`)).data : [];
  renew();
};

export const followContainers = renew;
