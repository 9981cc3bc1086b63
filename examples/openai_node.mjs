// A coding agent in one loop: the OpenAI npm SDK on one WebSocket connection, each turn sends only the new items.
//
//     node examples/openai_node.mjs FOLDER
//
// OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. A socket that ends (age limit, restart, drop) is opened
// again, and the whole history is sent once, because an unstored history lived on the old one; so is a turn that failed on
// the server's side.
import OpenAI from 'openai';
import { ResponsesWS } from 'openai/resources/responses/ws';
import { INSTRUCTIONS, TASK, TOOLS, Workspace, where } from './workspace.mjs';

const TURNS_MAX = 30;
const TRIES_MAX = 4;
const { baseURL, model } = await where();
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? 'none' });

class Lost extends Error {}

/** One turn on a socket; resolves with its response, rejects with `Lost` where another socket may help. */
function turn(socket, fields) {
  return new Promise((resolve, reject) => {
    const onEvent = (event) => {
      if (event.type === 'response.completed') settle(resolve, event.response);
      if (event.type === 'response.failed' || event.type === 'response.incomplete') {
        const { error, incomplete_details: cut } = event.response;
        const Kind = error?.code === 'server_error' ? Lost : Error;
        settle(reject, new Kind(`${event.type}: ${error?.code ?? cut?.reason} ${error?.message ?? ''}`));
      }
      if (event.type === 'error') {
        const again = ['previous_response_not_found', 'websocket_connection_limit_reached'];
        const Kind = again.includes(event.error.code) ? Lost : Error;
        settle(reject, new Kind(`${event.error.code}: ${event.error.message}`));
      }
    };
    const onClose = (code) => settle(reject, new Lost(`the socket was closed (${code})`));
    const onError = (error) => {
      // A refused handshake is final; an error event was told above already.
      if (/Unexpected server response: \d+/.test(error.message)) settle(reject, error);
    };
    const settle = (call, value) => {
      socket.off('event', onEvent);
      socket.off('close', onClose);
      call(value);
    };
    socket.on('event', onEvent);
    socket.on('close', onClose);
    socket.on('error', onError);
    socket.send({ type: 'response.create', model, instructions: INSTRUCTIONS, tools: TOOLS, store: false, ...fields });
  });
}

async function main(folder) {
  const workspace = new Workspace(folder);
  const history = [{ role: 'user', content: TASK }];
  let socket = new ResponsesWS(client);
  let fresh = history.slice();
  let parent = {};
  for (let turns = 0, tries = 0; turns < TURNS_MAX; ) {
    let response;
    try {
      response = await turn(socket, { input: fresh, ...parent });
    } catch (error) {
      if (!(error instanceof Lost) || ++tries === TRIES_MAX) throw error;
      console.error(`again on a new socket: ${error.message}`);
      socket.close();
      socket = new ResponsesWS(client);
      [fresh, parent] = [history.slice(), {}];
      continue;
    }
    [turns, tries] = [turns + 1, 0];
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (calls.length === 0) {
      socket.close();
      return response.output.flatMap((item) => item.content ?? []).map((part) => part.text).join('');
    }
    fresh = calls.map((call) => ({
      type: 'function_call_output',
      call_id: call.call_id,
      output: workspace.call(call.name, JSON.parse(call.arguments)),
    }));
    history.push(...response.output, ...fresh);
    parent = { previous_response_id: response.id };
  }
  throw new Error(`the model went on for ${TURNS_MAX} turns`);
}

try {
  console.log(await main(process.argv[2]));
} catch (error) {
  console.error(error.message);
  process.exit(1);
}
