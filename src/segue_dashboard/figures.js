// What did one turn cost? Its stages, tokens, speed, where it ran, and how it ended.

import { askJson } from "./api.js";
import { showCache } from "./cache.js";
import { $, bytes, clock, h, took } from "./dom.js";
import { pausesOf, stagesOf } from "./past.js";
import { openReader } from "./reader.js";

const AFTER = "after the answer; the client does not wait for it";

const number = (value) => value.toLocaleString("en-US");

const row = (name, value, note = "", kind = "") =>
  value === null || value === undefined || value === ""
    ? null
    : h(
        "div",
        { class: `figure ${kind}` },
        h("dt", {}, name),
        h("dd", {}, String(value), note ? h("small", {}, note) : null),
      );

const group = (title, ...rows) => h("section", {}, h("h3", {}, title), h("dl", {}, ...rows));

const stages = (turn) => {
  const all = stagesOf(turn);
  const longest = Math.max(...all.map(([kind, , from, to]) => (kind === "settle" ? 0 : to - from)), 0.001);
  return all.map(([kind, label, from, to]) => {
    const bar = h("i", { class: kind });
    bar.style.width = `${Math.min(100, Math.max(1, ((to - from) * 100) / longest))}%`;
    return h(
      "div",
      { class: "figure stage" },
      h("dt", {}, label),
      h("dd", {}, took(to - from), kind === "settle" ? h("small", {}, AFTER) : null),
      h("span", { class: "stage-bar", "aria-hidden": "true" }, bar),
    );
  });
};

const paused = (turn) => pausesOf(turn).reduce((sum, [, , from, to]) => sum + to - from, 0);

const groups = (turn) => [
  group(
    "Turn",
    row("status", turn.status, "", turn.status === "failed" ? "bad" : ""),
    row("error", turn.error, "", "bad"),
    row("model", turn.model),
    row("engine replica", turn.replica),
    row("transport", turn.transport, turn.lane ? `lane ${turn.lane}` : ""),
    row("connection", turn.connection),
    row("request id", turn.request_id),
    row("continues", turn.parent),
    row("parent found in", turn.found_in),
    row("began", clock(turn.at_ms)),
  ),
  group(
    "Time",
    row("to the first token", turn.first_ms === null ? null : took(turn.first_ms)),
    row("to the last event", turn.total_ms === null ? null : took(turn.total_ms)),
    row("output tokens per second", turn.speed === null ? null : number(Math.round(turn.speed))),
    row("overhead of Segue", turn.own_ms === null ? null : took(turn.own_ms), "without the engine"),
    row("paused for tools", turn.tools ? took(paused(turn)) : null, `${turn.tools} calls`),
  ),
  group(
    "Tokens",
    row("input", number(turn.input)),
    row("new in Segue", number(turn.tokenized), "rendered and tokenized for this turn"),
    row("reused by Segue", number(turn.reused), "reused from earlier turns"),
    row("cached in the engine", number(turn.cached), "read from its prefix cache, as it reports"),
    row("computed again", turn.lost ? number(turn.lost) : null, "although an earlier prompt had them", "bad"),
    row("output", number(turn.output)),
    row("request size", bytes(turn.bytes)),
    row("images and audio", turn.unseen || null, "replaced by descriptions"),
  ),
  group("Stages", ...stages(turn)),
];

// What a hosted call ran: its commands and how each has ended; or Python code, with its status.
const ranBy = (call, answers) =>
  call.type === "code_interpreter_call"
    ? [[call.code, call.status === "completed" ? "" : call.status, call.status === "failed"]]
    : call.action.commands.map((command, at) => {
        const outcome = answers.get(call.call_id)?.[at]?.outcome;
        const ended = outcome ? (outcome.type === "exit" ? `exit ${outcome.exit_code}` : outcome.type) : "";
        return [command, ended, Boolean(outcome?.exit_code)];
      });

// The commands of hosted calls, as the stored response has them; each call of a round was one pause of the turn.
const commands = (turn, output) => {
  const pauses = pausesOf(turn);
  const calls = output.filter(
    (item) => item.type === "code_interpreter_call" || (item.type === "shell_call" && item.environment?.container_id),
  );
  const answers = new Map(
    output.filter((item) => item.type === "shell_call_output").map((item) => [item.call_id, item.output]),
  );
  const rows = calls.flatMap((call, index) => {
    const [, , from, to] = (pauses.length === calls.length && pauses[index]) || [];
    return ranBy(call, answers).map(([text, ended, isBad], at) => {
      const time = at === 0 && to !== undefined ? took(to - from) : "";
      return h(
        "div",
        { class: `figure command ${isBad ? "bad" : ""}` },
        h("dt", { class: "mono" }, text),
        h("dd", {}, [ended, time].filter(Boolean).join(" \u00b7 ")),
      );
    });
  });
  return rows.length ? [group("Commands", ...rows)] : [];
};

const showCommands = async (turn) => {
  const box = $("figures-rows");
  try {
    const { id, output } = await askJson(`/v1/responses/${turn.id}`);
    if ($("figures-sub").textContent === id) box.append(...commands(turn, output));
  } catch {
    // Not stored, or deleted.
  }
};

export const openFigures = (turn) => {
  $("figures-sub").textContent = turn.id;
  $("figures-rows").replaceChildren(...(turn.mark ? groups(turn) : []));
  $("figures-read").onclick = () => {
    $("figures").close();
    openReader(turn.id);
  };
  if (turn.tools) showCommands(turn);
  showCache(turn.id, $("figures-cache"));
  $("figures").showModal();
};
