// Which turns have ended so far? A bounded list, and the chains that they form.

const TURNS_MAX = 600;

export const STAGES = [
  ["validate", "validate", "received", "validated"],
  ["resolve", "resolve", "validated", "resolved"],
  ["render", "render", "resolved", "rendered"],
  ["first", "first token", "rendered", "first_token"],
  ["sample", "sampling", "first_token", "last_token"],
  ["save", "save", "last_token", "saved"],
  ["send", "send", "saved", "sent"],
  ["settle", "settle", "sent", "settled"],
];

// [class, label, from ms, to ms]; a stage whose end is unknown is left out, one whose start is unknown begins at the
// last mark before it.
export const stagesOf = (turn) => {
  const found = [];
  let last = 0;
  for (const [kind, label, , to] of STAGES) {
    const end = turn.mark[to];
    if (end === null || end === undefined) continue;
    found.push([kind, label, last, Math.max(last, end)]);
    last = Math.max(last, end);
  }
  return found;
};

// When sampling paused for a server-side tool; drawn over the stages.
export const pausesOf = (turn) => (turn.pauses ?? []).map(([from, to]) => ["pause", "tools", from, to]);

const derive = (turn, names) => {
  turn.mark = Object.fromEntries(names.map((name, at) => [name, turn.marks[at]]));
  const { first_token: first, last_token: last, sent } = turn.mark;
  turn.first_ms = first ?? null;
  turn.total_ms = sent ?? last ?? null;
  const paused = pausesOf(turn)
    .filter(([, , from]) => first !== null && from >= first)
    .reduce((sum, [, , from, to]) => sum + to - from, 0);
  const spoke = first !== null && last !== null ? last - first - paused : 0;
  turn.speed = spoke > 0.5 && turn.output > 1 ? ((turn.output - 1) * 1000) / spoke : null;
  // Everything but the engine: what Segue itself adds to a turn.
  const engine = first !== null && last !== null ? last - (turn.mark.rendered ?? 0) : 0;
  turn.own_ms = turn.total_ms === null ? null : Math.max(0, turn.total_ms - engine);
  return turn;
};

// The turn of a chain that had ended last at this time.
const newest = (nodes, at_ms) => nodes.findLast((one) => one.at_ms + (one.total_ms ?? 0) <= at_ms)?.id ?? null;

export class Past {
  constructor() {
    this.now_ms = Date.now();
    this.clear([]);
  }

  clear(names) {
    this.names = names;
    this.turns = [];
    this.missed = 0;
    this.byId = new Map();
  }

  // The clock of the server, which goes on between two updates.
  set now_ms(ms) {
    this.told = [ms, performance.now()];
  }

  get now_ms() {
    return this.told[0] + performance.now() - this.told[1];
  }

  add(rows) {
    for (const row of rows) {
      const turn = derive(row, this.names);
      this.turns.push(turn);
      this.byId.set(turn.id, turn);
    }
    if (this.turns.length > TURNS_MAX)
      for (const old of this.turns.splice(0, this.turns.length - TURNS_MAX)) this.byId.delete(old.id);
    // They arrive in the order in which they ended, and are drawn in the order in which they began.
    this.turns.sort((a, b) => a.at_ms - b.at_ms);
  }

  // Chains, the latest first: ended and running turns joined by their parents, and by the name of the chain where the
  // parent ran at another machine, or where the client has sent its history again and named no parent.
  chains(running) {
    const roots = new Map();
    // Parents begin before their children, so that each root is known when it is asked for.
    const rootOf = new Map();
    const ofChain = new Map();
    const live = running
      .filter((one) => !this.byId.has(one.id))
      .map((one) => ({ ...one, isRunning: true, at_ms: one.created_at * 1000, status: "running" }));
    for (const turn of [...this.turns, ...live]) {
      const node = turn.parent ? turn : { ...turn, parent: newest(ofChain.get(turn.chain) ?? [], turn.at_ms) };
      if (node.chain) ofChain.set(node.chain, [...(ofChain.get(node.chain) ?? []), node]);
      const root = node.parent ? (rootOf.get(node.parent) ?? (node.chain || node.parent)) : node.id;
      rootOf.set(node.id, root);
      if (!roots.has(root)) roots.set(root, { root, nodes: [], last_ms: 0 });
      const chain = roots.get(root);
      chain.nodes.push(node);
      chain.last_ms = Math.max(chain.last_ms, node.at_ms);
    }
    return [...roots.values()].sort((a, b) => b.last_ms - a.last_ms);
  }
}
