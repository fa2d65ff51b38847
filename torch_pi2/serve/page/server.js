// What is asked of the server: with the key, if it wants one, which this tab alone keeps.

const KEY = 'torch-pi2-key';

/** The server wants a key, or another one. */
export class NoKey extends Error {}

export function keep(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function asked(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key !== null && /[^\u0000-\u00ff]/.test(key)) throw new NoKey('This key has letters that cannot be sent.');
  const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers, credentials: 'omit' });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered ${response.status}`;
  throw response.status === 401 ? new NoKey(message) : new Error(message);
}

export async function models() {
  return (await (await asked('v1/models')).json()).data;
}

/** Events of an answer, as they come: of a chat, or of a text that is continued. Ends with `signal`. */
export async function* answer(path, body, signal) {
  const options = { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body), signal };
  for await (const { data } of events(await asked(path, options))) {
    if (data === '[DONE]') return;
    const piece = JSON.parse(data);
    if (piece.error) throw new Error(piece.error.message);
    yield piece;
  }
}

/** What the engine does: pairs of a name and figures, until `signal`. */
export async function* live(model, signal) {
  for await (const { name, data } of events(await asked(`v1/live?model=${encodeURIComponent(model)}`, { signal }))) {
    const figures = JSON.parse(data);
    if (name === 'error') throw new Error(figures.error.message);
    yield [name, figures];
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split('\n\n');
    held = blocks.pop();
    for (const block of blocks) {
      const fields = block.split('\n').map((line) => line.split(/: (.*)/s, 2));
      const field = (name) => fields.filter(([key]) => key === name).map(([, text]) => text).join('\n');
      yield { name: field('event'), data: field('data') };
    }
  }
}
