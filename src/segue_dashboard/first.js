// What can somebody do who has just started the server? A request to paste, until there has been one.

import { hasKey } from "./api.js";
import { $, copyText } from "./dom.js";

// For a shell: within single quotes only a single quote has a meaning.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const request = (model) => {
  const key = hasKey() ? ' -H "Authorization: Bearer $SEGUE_KEY"' : "";
  // A small model does not always know when to stop.
  const body = JSON.stringify({ model, input: "Name a fruit.", max_output_tokens: 64 });
  return `curl ${location.origin}/v1/responses${key} -d ${quoted(body)}`;
};

export const offerFirst = (models) => {
  $("first-line").textContent = models.length ? request(models[0]) : "";
};

export const drawFirst = (past, picture) => {
  const isUsed = past.turns.length || picture.totals.turns || picture.running_count;
  $("first").hidden = Boolean(isUsed) || !$("first-line").textContent;
};

export const startFirst = () => {
  const button = $("first-copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copyText($("first-line").textContent)) ? "Copied" : "Not copied: select it";
  });
};
