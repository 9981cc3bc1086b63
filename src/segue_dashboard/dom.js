// How is something put on the page? Elements, and formatted figures. Text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on") && typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return node;
};

export const $ = (id) => document.getElementById(id);
export const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const bytes = (n) => {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000 || unit === "GB")
      return `${unit === "B" || n >= 100 ? Math.round(n) : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
};

export const count = (n) => {
  if (n < 10000) return Math.round(n).toLocaleString("en-US");
  return n < 1e6 ? `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(n < 1e8 ? 1 : 0)}M`;
};

// [figure, unit], so that a unit can be set smaller.
export const span = (ms) => {
  if (ms < 1000) return [ms < 10 ? ms.toFixed(1) : String(Math.round(ms)), "ms"];
  return ms < 60000 ? [(ms / 1000).toFixed(ms < 10000 ? 2 : 1), "s"] : [(ms / 60000).toFixed(1), "min"];
};
export const took = (ms) => span(ms).join(" ");
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
export const short = (id) => (id ? id.slice(-6) : "");

export const age = (ms) => {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
};

export const median = (values) => {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

// What waits until the pointer is released: an element that is replaced between press and release is never clicked.
let isPressed = false;
const waiting = new Set();
const release = () => {
  isPressed = false;
  for (const paint of waiting) paint();
  waiting.clear();
};
addEventListener("pointerdown", () => {
  isPressed = true;
}, true);
// The click comes right after the release.
for (const name of ["pointerup", "pointercancel", "contextmenu", "blur"]) addEventListener(name, () => setTimeout(release), true);

// At most one drawing per animation frame, however often it is requested; none while the page is hidden.
export const painter = (draw) => {
  let isDue = false;
  const paint = () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      if (isPressed) waiting.add(paint);
      else draw();
    });
  };
  return paint;
};

// One tooltip for all charts; it follows the pointer, or stands next to the focused element.
export const tip = {
  show(event, lines) {
    const box = $("tip");
    box.replaceChildren(...lines);
    box.hidden = false;
    const at =
      event.clientX !== undefined && event.clientX + event.clientY > 0
        ? { x: event.clientX, y: event.clientY }
        : (({ left, bottom }) => ({ x: left + 60, y: bottom }))(event.target.getBoundingClientRect());
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(at.x + 14, innerWidth - width - 8))}px`;
    box.style.top = `${at.y + 18 + height > innerHeight ? at.y - height - 12 : at.y + 18}px`;
  },
  hide() {
    $("tip").hidden = true;
  },
};

// Arrow keys move inside a group that has one tab stop.
export const roving = (event, nodes, current) => {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = nodes[Math.max(0, Math.min(nodes.length - 1, nodes.indexOf(current) + step))];
  for (const node of nodes) node.setAttribute("tabindex", node === next ? 0 : -1);
  next?.focus();
};

// Puts text on the clipboard; false where the browser does not allow it. Without TLS there is no clipboard API, except
// on the same machine: then the text is selected and copied as a person would.
export const copyText = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
};

const copySelected = (text) => {
  const box = h("textarea", { readonly: true, class: "away" });
  box.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  return isCopied;
};
