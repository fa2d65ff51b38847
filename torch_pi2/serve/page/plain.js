// Text as it is, but for code between fences, which stands in a box of its own. Nothing of it is ever taken for HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)[^`]*$/;

/** Pieces of `text`: `{ text }`, or `{ text, code: true, language }`. The last one may have no end yet. */
export function pieces(text) {
  const found = [{ text: '' }];
  let fence = null;
  for (const line of text.split(/(?<=\n)/)) {
    const mark = FENCE.exec(line.replace(/\n$/, ''));
    const last = found.at(-1);
    if (fence === null && mark) {
      fence = mark[1];
      found.push({ text: '', code: true, language: mark[2] });
    } else if (fence !== null && mark && mark[1].startsWith(fence) && !mark[2]) {
      fence = null;
      found.push({ text: '' });
    } else {
      last.text += line;
    }
  }
  return found.filter((piece) => piece.code || piece.text.trim() !== '');
}

/** Shows `text` in `parent`, in which nothing else is shown; what has not changed stays (a selection in it, too). */
export function show(parent, text) {
  const wanted = pieces(text);
  while (parent.childElementCount > wanted.length) parent.lastElementChild.remove();
  wanted.forEach((piece, i) => {
    let node = parent.children[i];
    if (node && node.classList.contains('code') !== Boolean(piece.code)) {
      while (parent.childElementCount > i) parent.lastElementChild.remove();
      node = undefined;
    }
    if (!node) {
      node = piece.code ? codeBox() : make('div', 'text');
      parent.append(node);
    }
    if (piece.code) node.querySelector('span').textContent = piece.language || 'code'; // it grows, too
    const home = piece.code ? node.querySelector('code') : node;
    const shown = piece.code ? piece.text.replace(/\n$/, '') : trimmed(piece.text, i > 0);
    if (home.textContent !== shown) home.textContent = shown;
  });
}

function trimmed(text, inside) {
  return inside ? text.replace(/^\n+/, '').trimEnd() : text.trimEnd();
}

function codeBox() {
  const box = make('div', 'code');
  const head = make('header');
  const copy = make('button', '', 'Copy');
  copy.type = 'button';
  copy.addEventListener('click', async () => {
    await navigator.clipboard.writeText(box.querySelector('code').textContent);
    copy.textContent = 'Copied';
    setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
  });
  head.append(make('span'), copy);
  const pre = make('pre');
  pre.tabIndex = 0;
  pre.append(make('code'));
  box.append(head, pre);
  return box;
}

export function make(tag, name = '', text = '') {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}
