// The chat: what was said, and the answer that grows.

import { answer, NoKey } from './server.js';
import { make, show } from './plain.js';

const $ = (id) => document.getElementById(id);

export class Chat {
  /** `model()`: the one that is chosen now, as /v1/models describes it. `refused()`: the server wants another key. */
  constructor(model, refused) {
    this.model = model;
    this.refused = refused;
    this.said = [];
    this.stopper = null;
    $('send').addEventListener('click', () => this.send());
    $('stop').addEventListener('click', () => this.stop());
    $('new').addEventListener('click', () => this.reset());
    $('ask').addEventListener('input', fit);
    $('ask').addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.stop();
    });
  }

  stop() {
    this.stopper?.abort();
  }

  reset() {
    this.stop();
    this.said = [];
    $('log').replaceChildren();
    $('welcome').hidden = false;
    $('ask').focus();
  }

  async send() {
    const text = $('ask').value;
    if (this.stopper || !text.trim() || !this.model()) return;
    const said = this.said; // of this chat: a new one may begin while it is answered
    const question = this.entry('user');
    show(question, text);
    said.push({ role: 'user', content: text });
    $('ask').value = '';
    fit();
    $('welcome').hidden = true;
    const entry = this.entry('assistant');
    entry.classList.add('growing');
    this.stopper = new AbortController();
    this.busy(true);
    const growing = new Growing(entry);
    try {
      await this.read(growing, this.stopper.signal);
    } catch (error) {
      if (error.name !== 'AbortError') {
        if (error instanceof NoKey) this.refused(error.message);
        growing.failed = error.message;
      }
    }
    entry.classList.remove('growing');
    growing.end();
    if (growing.failed && !growing.text) {
      said.pop(); // to be asked again
      if (!$('ask').value) $('ask').value = text;
      fit();
    } else {
      said.push({ role: 'assistant', content: growing.text });
    }
    this.stopper = null;
    this.busy(false);
  }

  async read(growing, signal) {
    const { path, body } = this.request();
    for await (const piece of answer(path, body, signal)) {
      const [choice] = piece.choices;
      if (piece.usage) growing.tokens = piece.usage.completion_tokens;
      if (choice) growing.add(choice.delta ? choice.delta.content ?? '' : choice.text, choice.finish_reason);
    }
  }

  /** By the chat template; where the model has none, all that was said is one text that it continues. */
  request() {
    const model = this.model();
    const system = $('system').value.trim();
    const messages = [...(system ? [{ role: 'system', content: system }] : []), ...this.said];
    const limit = Math.min(Number($('limit').value) || 512, Math.floor(model.max_tokens / 2));
    const shared = {
      model: model.id, temperature: Number($('temperature').value), stream: true, stream_options: { include_usage: true },
    };
    return model.chat
      ? { path: 'v1/chat/completions', body: { ...shared, messages, max_completion_tokens: limit } }
      : { path: 'v1/completions', body: { ...shared, prompt: messages.map((m) => m.content).join(''), max_tokens: limit } };
  }

  entry(role) {
    const entry = make('li', `said ${role}${this.model().chat ? '' : ' continued'}`);
    $('log').append(entry);
    bottom();
    return entry;
  }

  busy(now) {
    $('stop').hidden = !now;
    $('send').hidden = now;
    if (now && document.activeElement === document.body) $('ask').focus();
  }
}

/** An answer: drawn once a frame, however many tokens come. */
class Growing {
  constructor(entry) {
    this.entry = entry;
    this.body = entry.appendChild(make('div'));
    this.body.append(make('div', 'text'));
    this.text = this.failed = '';
    this.tokens = this.finish = this.first = null;
    this.pieces = 0; // mostly a token each
    this.began = performance.now();
    this.frame = 0;
  }

  add(text, finish) {
    if (text && this.first === null) this.first = performance.now();
    this.text += text;
    this.pieces += text ? 1 : 0;
    this.finish = finish ?? this.finish;
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const follow = atBottom();
    show(this.body, this.text);
    if (follow) bottom();
  }

  end() {
    cancelAnimationFrame(this.frame);
    const follow = atBottom();
    show(this.body, this.text);
    if (this.failed) {
      const error = make('div', 'error');
      error.append(make('div', 'text', this.failed));
      this.entry.append(error);
    } else {
      this.entry.append(make('div', 'about', this.about()));
    }
    if (follow) bottom();
  }

  about() {
    const seconds = (performance.now() - this.began) / 1000;
    const why = { length: 'the limit of tokens was reached', stop: '' }[this.finish] ?? 'stopped';
    const tokens = this.tokens ?? this.pieces;
    return [
      `${this.tokens === null ? 'about ' : ''}${tokens} tokens`,
      tokens > 1 && this.first !== null
        ? `${rate((tokens - 1) / Math.max(1e-3, seconds - (this.first - this.began) / 1000))} a second` : '',
      this.first === null ? '' : `the first after ${((this.first - this.began) / 1000).toFixed(2)} s`,
      why,
    ].filter(Boolean).join(' · ');
  }
}

function rate(value) {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

function fit() {
  const ask = $('ask');
  ask.style.height = 'auto';
  ask.style.height = `${ask.scrollHeight}px`;
}

function atBottom() {
  const log = $('log');
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function bottom() {
  $('log').scrollTop = $('log').scrollHeight;
}
