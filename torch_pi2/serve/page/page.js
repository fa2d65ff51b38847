// Puts the page together: models, the key, the chat and the figures.

import { Chat } from './chat.js';
import { Engine } from './engine.js';
import { hasKey, keep, live, models, NoKey } from './server.js';

const $ = (id) => document.getElementById(id);
let known = [];
let watching = null;

const engine = new Engine();
const chat = new Chat(() => known.find((model) => model.id === $('model').value), askForKey);

async function begin() {
  try {
    known = await models();
  } catch (error) {
    if (error instanceof NoKey) return askForKey(hasKey() ? error.message : '');
    engine.lost(`The server cannot be reached: ${error.message}`);
    setTimeout(begin, 2000);
    return undefined;
  }
  $('model').replaceChildren(...known.map((model) => new Option(model.id, model.id)));
  $('model').disabled = known.length < 2;
  chosen();
  return undefined;
}

function chosen() {
  const model = known.find((one) => one.id === $('model').value);
  if (!model) return;
  document.title = `${model.id} · torch_pi2`;
  $('limit').max = Math.floor(model.max_tokens / 2);
  $('ask').placeholder = model.chat ? 'Message' : 'The beginning of a text';
  $('welcome-text').textContent = model.chat
    ? 'And look at the engine while it answers.'
    : 'This model has no chat template: it continues what you write. Look at the engine while it does.';
  watch(model.id);
}

/** Follows the figures of a model until another is chosen; nobody looks on while the page is hidden. */
async function watch(model) {
  watching?.abort();
  if (document.hidden) return;
  const mine = (watching = new AbortController());
  for (let pause = 500; !mine.signal.aborted; pause = Math.min(2 * pause, 10000)) {
    try {
      for await (const [name, figures] of live(model, mine.signal)) {
        pause = 500;
        engine.told(name, figures);
      }
      engine.lost('The server has ended.');
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof NoKey) return void askForKey(error.message);
      engine.lost(error instanceof TypeError ? 'The server cannot be reached.' : error.message);
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}

function askForKey(why) {
  if ($('key-dialog').open) return;
  if (why) $('key-why').textContent = why;
  $('key').value = '';
  $('key-dialog').showModal();
}

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  keep($('key').value);
  $('key-dialog').close();
  begin();
});
$('key-dialog').addEventListener('cancel', () => engine.lost('The server asks for a key: reload the page to give it one.'));
$('model').addEventListener('change', chosen);
document.addEventListener('visibilitychange', chosen);
for (const [button, engineShown] of [['show-chat', false], ['show-engine', true]]) {
  $(button).addEventListener('click', () => {
    document.body.classList.toggle('engine', engineShown);
    $('show-chat').setAttribute('aria-pressed', String(!engineShown));
    $('show-engine').setAttribute('aria-pressed', String(engineShown));
    engine.draw();
  });
}
begin();
