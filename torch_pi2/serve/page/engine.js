// The figures beside the chat: numbers, a bar for each layer, and what the last half minute was like.

import { make } from './plain.js';

const $ = (id) => document.getElementById(id);
const KEPT_S = 30;

export class Engine {
  constructor() {
    this.about = null;
    this.rows = [];
    this.past = []; // { at, speed, fired: [share by layer] }
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
    addEventListener('resize', () => this.draw());
  }

  /** An event of /v1/live. */
  told(name, figures) {
    if (name === 'model') this.begin(figures);
    else if (name === 'figures' || name === 'idle') this.figures(name, figures);
  }

  lost(why) {
    $('status').className = 'lost';
    $('status').textContent = why;
  }

  begin(about) {
    if (this.about?.model !== about.model) this.past = [];
    this.about = about;
    const sparse = about.sparse;
    for (const id of ['layers-card', 'fired-tile', 'used-tile']) $(id).hidden = !sparse;
    $('dense').hidden = sparse;
    $('store-card').hidden = $('hits-tile').hidden = !about.store;
    $('batch-size').textContent = ` of ${about.max_batch_size}`;
    $('together').hidden = about.together < 2;
    $('together').textContent = `Weights used are of all ${about.together} models of this server together.`;
    $('layers').classList.toggle('many', about.layers.length > 12);
    this.rows = about.layers.map((layer, i) => new Row(layer, i));
    $('layers').replaceChildren(...this.rows.map((row) => row.node));
    this.draw();
  }

  figures(name, now) {
    const idle = name === 'idle';
    $('status').className = idle ? '' : 'busy';
    $('status').textContent = idle ? 'Idle. Figures are of what was done last.' : working(now);
    $('live').textContent = now.live;
    $('waiting').textContent = now.waiting;
    const fired = now.layers.map((layer) => (layer.tokens ? layer.fired_hot + layer.fired_cold : null));
    if (now.layers.some((layer) => layer.tokens)) {
      now.layers.forEach((layer, i) => this.rows[i]?.show(layer));
      $('fired').textContent = percent(mean(now.layers, this.about.layers));
      if (now.ffn.rows_used !== null) $('used').textContent = percent(now.ffn.rows_used);
    }
    // where an answer ended is a part of a window without tokens: no speed to remember
    if (now.live || (now.answer_tokens && !(Number($('speed').textContent) > 0))) {
      $('speed').textContent = $('speed-small').textContent = number(now.tokens_per_second);
    }
    if (idle) $('speed-small').textContent = '';
    if (now.step) $('step-ms').textContent = ms(now.step.ms);
    if (now.prompt) $('prompt-ms').textContent = `Reading ${now.prompt.tokens} tokens of prompts: ${ms(now.prompt.ms)}`;
    else if (now.step && $('prompt-ms').textContent === 'Nothing measured yet.') $('prompt-ms').textContent = '';
    if (now.store?.wanted) this.store(now);
    const at = performance.now() / 1000;
    this.past.push({ at, seconds: Math.min(1, now.seconds), speed: now.tokens_per_second, fired });
    while (this.past.length && this.past[0].at < at - KEPT_S) this.past.shift();
    this.draw();
  }

  store(now) {
    const { wanted, hits, bytes_read: bytes, resident, slots, cache_bytes: cache } = now.store;
    $('hits').textContent = percent(hits / wanted);
    $('hits-bar').style.width = `${(100 * hits) / wanted}%`;
    $('store-text').textContent = `${percent(hits / wanted)} of the neurons that were wanted were in memory; `
      + `${size(bytes / now.seconds)} a second read. The cache has ${size(cache)}`
      + `${slots ? `, ${percent(resident / slots)} of it filled` : ''}.`;
  }

  draw() {
    if (!this.about) return;
    this.drawSpeeds();
    if (this.about.sparse) this.drawHeat();
  }

  drawSpeeds() {
    const { context, width, height } = cleared($('speeds'));
    const most = Math.max(1, ...this.past.map((one) => one.speed));
    if (!width || this.past.length < 2) return;
    const now = performance.now() / 1000;
    const x = (at) => width * (1 - (now - at) / KEPT_S);
    const y = (speed) => height - 3 - (height - 12) * (speed / most);
    context.beginPath();
    this.past.forEach((one, i) => context[i ? 'lineTo' : 'moveTo'](x(one.at), y(one.speed)));
    context.strokeStyle = colour('--accent');
    context.lineWidth = 2;
    context.lineJoin = 'round';
    context.stroke();
    context.lineTo(x(this.past.at(-1).at), height);
    context.lineTo(x(this.past[0].at), height);
    context.globalAlpha = 0.14;
    context.fillStyle = colour('--accent');
    context.fill();
  }

  drawHeat() {
    const count = this.about.layers.length;
    $('heat').style.height = `${Math.max(48, Math.min(12 * count, 200))}px`;
    const { context, width, height } = cleared($('heat'));
    const values = this.past.flatMap((one) => one.fired).filter((value) => value !== null);
    const most = values.length ? Math.max(0.01, Math.max(...values)) : 1;
    $('scale-most').textContent = values.length ? percent(most) : '';
    const scale = colour('--heat').split(',').map((text) => text.trim());
    const now = performance.now() / 1000;
    const second = width / KEPT_S;
    for (const { at, seconds, fired } of this.past) {
      const right = width - (now - at) * second;
      fired.forEach((value, i) => {
        if (value === null) return;
        context.fillStyle = between(scale, value / most);
        const top = Math.round((i * height) / count);
        const left = Math.floor(right - seconds * second);
        context.fillRect(left, top, Math.ceil(right) - left + 1, Math.round(((i + 1) * height) / count) - top);
      });
    }
  }
}

/** A bar: all neurons of a layer, the hot ones from the left. */
class Row {
  constructor(layer, index) {
    const number = layer.key.split('.').find((part) => /^\d+$/.test(part)) ?? String(index);
    const experts = layer.experts ? ` of ${layer.experts} experts, ${Math.round(layer.chosen * layer.experts)} for a token` : '';
    this.node = make('div', 'layer');
    this.node.title = `${layer.key}: ${layer.neurons} neurons${experts}, ${layer.method}`;
    this.bar = make('div', 'bar');
    this.bar.setAttribute('role', 'img');
    [this.hot, this.firedHot, this.firedCold] = ['hot idle', 'hot', 'cold'].map((name) => make('i', name));
    this.bar.append(this.hot, this.firedHot, this.firedCold);
    this.share = make('b', '', '–');
    this.node.append(make('span', '', number), this.bar, this.share);
  }

  show({ tokens, hot, fired_hot: firedHot, fired_cold: firedCold }) {
    if (!tokens) return;
    this.hot.style.width = `${100 * hot}%`;
    this.firedHot.style.width = `${100 * firedHot}%`;
    this.firedCold.style.left = `${100 * hot}%`;
    this.firedCold.style.width = `${100 * firedCold}%`;
    this.share.textContent = percent(firedHot + firedCold);
    this.bar.ariaLabel = `${percent(firedHot + firedCold)} fired; ${percent(hot)} are hot`;
  }
}

function working(now) {
  if (now.live) return now.live === 1 ? 'Decoding one sequence' : `Decoding ${now.live} sequences together`;
  return now.waiting ? 'Reading a prompt' : 'Done';
}

/** Of all neurons, whatever their layers' sizes. */
function mean(fired, layers) {
  const sum = (value) => layers.reduce((all, layer, i) => all + (fired[i].tokens ? layer.neurons * value(fired[i]) : 0), 0);
  return sum((layer) => layer.fired_hot + layer.fired_cold) / sum(() => 1);
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function number(value) {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

function ms(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

function size(bytes) {
  const power = Math.min(4, bytes < 1 ? 0 : Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function between(scale, share) {
  const at = Math.min(1, share) * (scale.length - 1);
  const low = Math.min(Math.floor(at), scale.length - 2);
  const [a, b] = [scale[low], scale[low + 1]].map((text) => [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16)));
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * (at - low))).join(' ')})`;
}

/** A canvas of as many dots as the screen has for it. */
function cleared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const dots = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dots)) canvas.width = Math.round(width * dots);
  if (canvas.height !== Math.round(height * dots)) canvas.height = Math.round(height * dots);
  const context = canvas.getContext('2d');
  context.setTransform(dots, 0, 0, dots, 0, 0);
  context.globalAlpha = 1;
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
