// What of a prompt was computed again although an earlier one had it, why, and where do the two part?

import { askJson } from "./api.js";
import { $, count, h, short, took } from "./dom.js";

// By reason: what happened, and what helps.
const CHANGED = "Keep the setting along a conversation: it is part of the prompt.";
const EVICTED = "Give the engine more memory for its prefix cache, or run fewer conversations at a time.";
const ONCE = "Each conversation is computed once at its new replica.";
const REASONS = {
  model_changed: ["Another model was named", "Use one model for one conversation."],
  tools_changed: [
    "The tools changed",
    "Send all tools from the beginning and in the same order; allow some of them with tool_choice.",
  ],
  text_format_changed: ["text.format changed", CHANGED],
  reasoning_effort_changed: ["reasoning.effort changed", CHANGED],
  verbosity_changed: ["text.verbosity changed", CHANGED],
  prompt_cache_key_changed: ["prompt_cache_key changed", "Use one key for one conversation."],
  service_tier_changed: ["service_tier changed", "Use one tier for one conversation."],
  context_compacted: ["The history was compacted", "Nothing to do: the prompt is shorter from here on."],
  input_changed: [
    "Instructions or earlier input changed",
    "Put what changes (a date, a counter, an id) into the last message; do not edit earlier ones.",
  ],
  reasoning_dropped: [
    "Earlier reasoning is gone from the prompt",
    "Send reasoning items again, or continue with previous_response_id.",
  ],
  history_truncated: [
    "The oldest items were dropped (truncation: auto)",
    "Compact the history, or raise the context of the model.",
  ],
  engine_evicted: ["The engine evicted the prefix, or a part of it", EVICTED],
  engine_restarted: [
    "The engine was not reachable for a while, and has lost the prefix",
    "See in the engine's log why it restarts, or what cuts the connection to it.",
  ],
  engine_drained: ["The replica with the prefix is drained", ONCE],
  engine_removed: ["The replica with the prefix was removed", ONCE],
  engine_down: ["The replica with the prefix does not answer", `See why: segue engines. ${ONCE}`],
  engine_busy: [
    "The replica with the prefix has a long queue",
    "Add replicas, or let the engine run more requests at once (engine_parallel).",
  ],
  engine_other_replica: [
    "Another replica served the turn",
    "Continue with previous_response_id, or set prompt_cache_key: such turns go back to their replica.",
  ],
};
const ABOUT = "Prompt tokens that are computed again although an earlier prompt had them";
const COSTS_MAX = 4;
// A sum over an hour of turns: not with every turn.
const RENEW_MS = 2000;

export const wordsOf = (reason) => REASONS[reason]?.[0] ?? reason;
const adviceOf = (reason) => REASONS[reason]?.[1] ?? "";

// --- one turn ---

// Where the two texts are the same again, counted from their ends.
const sameEnd = (one, other) => {
  let same = 0;
  const most = Math.min(one.length, other.length);
  while (same < most && one.at(-1 - same) === other.at(-1 - same)) same += 1;
  return same;
};

// A difference that cannot be seen is shown by marks.
const visible = (text) => (text.trim() ? text : text.replaceAll(" ", "·").replaceAll("\n", "↵\n").replaceAll("\t", "⇥"));

const side = (title, { text, at }, same) => {
  const end = text.length - same;
  return h(
    "div",
    { class: "side" },
    h("h4", {}, title),
    h(
      "pre",
      { tabindex: 0, "aria-label": title },
      text.slice(0, at),
      h("mark", {}, visible(text.slice(at, end)) || "▏"),
      text.slice(end),
    ),
  );
};

const whereOf = ({ part, item, name, line, character }) => {
  const what = part === "input" ? `input[${item}]${name ? ` (${name})` : ""}` : name ? `${part} '${name}'` : part;
  return ["instructions", "input"].includes(part) ? `${what}, line ${line}, character ${character}` : what;
};

const details = (report) => {
  const { before, now, place, reason } = report;
  const same = before && now ? sameEnd(before.text.slice(before.at), now.text.slice(now.at)) : 0;
  return [
    h("p", { class: "lost" }, `${wordsOf(reason)}: ${count(report.lost_tokens)} tokens were computed again`,
      report.lost_ms === null ? "." : `, about ${took(report.lost_ms)} of the time to the first token.`),
    h("p", { class: "sub" }, adviceOf(reason)),
    place ? h("p", { class: "sub" }, `The prompts part at ${whereOf(place)}.`) : null,
    before && now
      ? h(
          "div",
          { class: "sides" },
          side(`Earlier prompt (${short(report.compared_with)})`, before, same),
          side("This prompt", now, same),
        )
      : null,
  ];
};

const verdict = (report) => {
  if (report.reason) return details(report);
  const text =
    report.verdict === "first"
      ? "There was no earlier prompt to go on from."
      : `Nothing was lost: the prompt begins with the earlier one, ${count(report.reusable_tokens)} tokens.`;
  return [h("p", { class: "sub" }, text)];
};

// Texts are read with the page's own key, through the public API: only the owner of a response gets them.
export const showCache = async (id, box) => {
  box.replaceChildren(h("h3", {}, "Cache"));
  box.dataset.id = id;
  let found;
  try {
    found = verdict(await askJson(`/v1/responses/${encodeURIComponent(id)}/cache`));
  } catch (error) {
    const gone = "Nothing is known of this prompt: it is not in memory any more, or belongs to another owner.";
    found = [h("p", { class: "sub" }, error.status === 404 ? gone : error.message)];
  }
  if (box.dataset.id === id) box.append(...found.filter(Boolean));
};

// --- cache misses ---

const cost = ({ words, advice, response_id: id }, open) =>
  h(
    "div",
    { class: "loss" },
    h("b", {}, words),
    h("p", { class: "sub" }, advice),
    // Of turns of other owners an operator gets no id.
    id ? h("button", { type: "button", class: "quiet", onclick: () => open(id) }, `Show turn ${short(id)}`) : null,
  );

// The server sums up the last hour: of all owners for an operator, else of the key's own.
const load = async (open) => {
  let found;
  try {
    const { turns, input_tokens: all, lost_tokens: lost, costs } = await askJson("/dashboard/advice");
    $("losses-sub").textContent = lost
      ? `Last hour: ${count(lost)} of ${count(all)} prompt tokens were computed again although an earlier prompt had them`
      : ABOUT;
    found = costs.slice(0, COSTS_MAX).map((one) => cost(one, open));
    if (!found.length) found = [h("p", { class: "empty" }, turns ? "Nothing was lost." : "No turns yet.")];
  } catch (error) {
    found = [h("p", { class: "empty" }, error.message)];
  }
  $("losses").replaceChildren(...found);
};

// Asked for when a turn has lost something, and at most once in a while.
let timer = null;
export const renewAdvice = (open, ms = RENEW_MS) => {
  timer ??= setTimeout(() => {
    timer = null;
    load(open);
  }, ms);
};
