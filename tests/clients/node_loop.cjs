// Stories by the official JavaScript client's ResponsesWS, as an application would write them.
//
//     node node_loop.cjs BASE_URL STORY/MODEL ...     STORY is loop, refusal or lanes
//
// NODE_PATH names the folder of the client. Prints one JSON object: for each story what came, or how it broke.
'use strict';

const OpenAI = require('openai').default;
const { ResponsesWS } = require('openai/resources/responses/ws');

const TURNS_MAX = 64;
const WAIT_MS = 30_000;
const TERMINAL = new Set(['response.completed', 'response.failed', 'response.incomplete', 'error']);
const TOOLS = [
  {
    type: 'function',
    name: 'get_weather',
    description: 'The weather in a city',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string' } },
      required: ['city'],
      additionalProperties: false,
    },
    strict: true,
  },
];

/** One socket; `turn` resolves with the terminal event of a lane's next turn. */
class Talk {
  constructor(baseURL) {
    this.order = [];
    this.errors = [];
    this.closes = [];
    this.raws = 0;
    this.waiting = new Map();
    this.socket = new ResponsesWS(new OpenAI({ apiKey: 'sk-test', baseURL }));
    this.socket.on('event', (event) => this.heard(event));
    this.socket.on('raw', () => (this.raws += 1));
    this.socket.on('error', (error) => this.errors.push(error.constructor.name));
    this.socket.on('close', (code) => this.closes.push(code));
  }

  heard(event) {
    this.order.push([event.stream_id ?? null, event.type]);
    if (TERMINAL.has(event.type)) {
      const lane = event.stream_id ?? null;
      const told = this.waiting.get(lane);
      this.waiting.delete(lane);
      told(event);
    }
  }

  turn(fields) {
    const lane = fields.stream_id ?? null;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error('no terminal event')), WAIT_MS);
      this.waiting.set(lane, (event) => {
        clearTimeout(timer);
        resolve(event);
      });
      this.socket.send({ type: 'response.create', tools: TOOLS, store: false, ...fields });
    });
  }

  async close() {
    const closed = new Promise((resolve) => this.socket.on('close', resolve));
    this.socket.close();
    await closed;
  }
}

function outputs(response) {
  return response.output
    .filter((item) => item.type === 'function_call')
    .map((item) => ({
      type: 'function_call_output',
      call_id: item.call_id,
      output: `sunny in ${JSON.parse(item.arguments).city}`,
    }));
}

/** A tool loop to its end; the responses of its turns. */
async function work(talk, model, lane) {
  const place = lane === undefined ? {} : { stream_id: lane };
  const responses = [];
  let fields = { input: [{ role: 'user', content: 'What is the weather?' }] };
  while (responses.length < TURNS_MAX) {
    const { response } = await talk.turn({ model, ...place, ...fields });
    responses.push(response);
    const input = outputs(response);
    if (input.length === 0) break;
    fields = { previous_response_id: response.id, input };
  }
  return responses;
}

const STORIES = {
  async loop(talk, model) {
    return { responses: await work(talk, model) };
  },

  /** An unknown parent is an error event; the socket and the history on it live on. */
  async refusal(talk, model) {
    const first = await talk.turn({ model, input: 'Hello' });
    const parent = 'resp_unknown';
    const refused = await talk.turn({ model, input: 'x', previous_response_id: parent });
    const next = await talk.turn({
      model,
      previous_response_id: first.response.id,
      input: outputs(first.response),
    });
    return { first: first.response, refused, next: next.response };
  },

  /** Two loops beside each other, then a fork of one lane's end on the other lane. */
  async lanes(talk, model) {
    const [a, b] = await Promise.all([work(talk, model, 'a'), work(talk, model, 'b')]);
    const parent = a[0];
    const fork = await talk.turn({
      model,
      stream_id: 'b',
      previous_response_id: parent.id,
      input: outputs(parent),
    });
    return { a, b, fork };
  },
};

async function tell(baseURL, name) {
  const [story, model] = name.split('/');
  try {
    const talk = new Talk(baseURL);
    const found = await STORIES[story](talk, model);
    await talk.close();
    const { order, errors, closes, raws } = talk;
    return { ...found, order, errors, closes, raws };
  } catch (error) {
    return { broke: String(error.stack) };
  }
}

async function main() {
  const [baseURL, ...names] = process.argv.slice(2);
  const found = {};
  for (const name of names) found[name] = await tell(baseURL, name);
  process.stdout.write(JSON.stringify(found));
}

main();
