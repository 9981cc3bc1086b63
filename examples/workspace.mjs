// The tools of a small coding agent, for the JavaScript examples: list, read, edit, test, in one folder.
//
// Every path is checked to stay inside the folder, and a mistake is returned to the model as text: it may try again.
import { spawnSync } from 'node:child_process';
import { readFileSync, readdirSync, writeFileSync } from 'node:fs';
import { join, relative, resolve, sep } from 'node:path';

export const TASK = 'The tests in this folder fail. Find the bug, fix it, and run the tests.';
export const INSTRUCTIONS =
  'You are a coding agent. Work only through the tools: list the files, read what matters, edit it, run the tests. ' +
  'When the tests pass, say in one sentence what was wrong.';
const READ_CHARS_MAX = 20_000;
const TEST_MS_MAX = 60_000;

/** What each tool takes; all are strings, and all must be given. */
export const SHAPES = {
  list_files: ['List the files of the project.', {}],
  read_file: ['Read a file of the project.', { path: 'a path as listed' }],
  edit_file: [
    'Replace a text that occurs exactly once in a file by another.',
    { path: 'a path as listed', old: 'the text as it is now', new: 'the text as it is to be' },
  ],
  run_tests: ["Run the project's tests; the last line says whether they pass.", {}],
};

/** The tools in the shape of the Responses API. */
export const TOOLS = Object.entries(SHAPES).map(([name, [description, fields]]) => ({
  type: 'function',
  name,
  description,
  parameters: {
    type: 'object',
    properties: Object.fromEntries(
      Object.entries(fields).map(([key, text]) => [key, { type: 'string', description: text }]),
    ),
    required: Object.keys(fields),
    additionalProperties: false,
  },
  strict: true,
}));

/** One folder, and what may be done in it. */
export class Workspace {
  constructor(folder) {
    this.folder = resolve(folder);
  }

  list_files() {
    return readdirSync(this.folder, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile())
      .map((entry) => relative(this.folder, join(entry.parentPath, entry.name)))
      .filter((path) => !path.split(sep).some((part) => /^(\.|__)/.test(part)))
      .sort()
      .join('\n');
  }

  read_file({ path }) {
    return readFileSync(this.#inside(path), 'utf8').slice(0, READ_CHARS_MAX);
  }

  edit_file({ path, old, new: wanted }) {
    const file = this.#inside(path);
    const parts = readFileSync(file, 'utf8').split(old);
    if (parts.length !== 2) return `error: the old text occurs ${parts.length - 1} times in ${path}, not once`;
    writeFileSync(file, parts.join(wanted));
    return `${path} is changed`;
  }

  run_tests() {
    const done = spawnSync('python3', ['-B', '-m', 'unittest', '-q'], {
      cwd: this.folder,
      encoding: 'utf8',
      timeout: TEST_MS_MAX,
    });
    const verdict = done.status === 0 ? 'the tests pass' : 'the tests fail';
    return `${(done.stdout + done.stderr).slice(-READ_CHARS_MAX)}\n${verdict}`;
  }

  call(name, given) {
    if (!(name in SHAPES)) return `error: there is no tool '${name}'`;
    try {
      return this[name](given);
    } catch (error) {
      return `error: ${error.message}`;
    }
  }

  #inside(path) {
    const file = resolve(this.folder, path);
    if (file !== this.folder && !file.startsWith(this.folder + sep)) throw new Error(`${path} is outside the project`);
    return file;
  }
}

/** Where Segue is, and the model to ask: as named in the environment, else the first that it serves. */
export async function where() {
  const baseURL = process.env.OPENAI_BASE_URL ?? 'http://127.0.0.1:8080/v1';
  if (process.env.EXAMPLE_MODEL) return { baseURL, model: process.env.EXAMPLE_MODEL };
  const models = await (await fetch(`${baseURL}/models`)).json();
  return { baseURL, model: models.data[0].id };
}
