// What all views share: requests, the token, the address, formats and small parts. The token is kept here and nowhere else.
import { html, useState, useEffect, useLayoutEffect, useRef } from './vendor/preact.js';

export { html };
export const BASE = '/console';

// ------------------------------------------------------------------------------------ requests

let token = '';
const listeners = new Set();
export const session = { caller: null, needsToken: false, hasToken: () => token !== '' };

export function onSession(listener) { listeners.add(listener); return () => listeners.delete(listener); }
function changed() { for (const listener of listeners) listener(); }

export async function signIn(text) {
  token = text.trim();
  try {
    session.caller = await api('GET', '/v1/whoami');
    session.needsToken = false;
  } catch (error) {
    if (error.status !== 503) token = '';
    throw error;
  } finally { changed(); }
}

export async function signOut() {
  if (token.startsWith('lms')) await api('POST', '/v1/auth/log-out').catch(() => null);
  token = '';
  session.caller = null;
  session.needsToken = true;
  changed();
}

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `status ${status}`);
    this.status = status;
    this.hint = body.hint || '';
    this.code = body.code || '';
    this.body = body;
  }
}

export function request(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (token) sent.authorization = `Bearer ${token}`;
  return fetch(path, { method, body, headers: sent, signal, cache: 'no-store', credentials: 'omit' });
}

export async function failure(response) {
  const text = visible(await response.text());
  let body = { title: text.slice(0, 300) || response.statusText };
  try { body = JSON.parse(text); } catch { /* as it is */ }
  if (response.status === 401 && !session.needsToken) { session.needsToken = true; session.caller = null; changed(); }
  return new Problem(response.status, body);
}

export async function api(method, path, content, options = {}) {
  const given = content === undefined ? options : { ...options, body: JSON.stringify(content), headers: { 'content-type': 'application/json', ...options.headers } };
  let response;
  try { response = await request(method, path, given); } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Problem(0, { detail: 'the server does not answer', hint: 'is it running? the page tries again by itself' });
  }
  if (!response.ok) throw await failure(response);
  return response.status === 204 ? null : JSON.parse(visible(await response.text()));
}

/** Marks that change the order of what follows are shown as such: a name cannot pretend to be another one. */
export const visible = (text) => text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]|\\u(?:200[ef]|202[a-e]|206[6-9])/gi, (mark) => `⟨U+${(mark.length > 1 ? mark.slice(2) : mark.charCodeAt(0).toString(16)).toUpperCase()}⟩`);

// ------------------------------------------------------------------------------------- address

const visitors = new Set();
export function place() {
  const path = decodeURI(location.pathname).slice(BASE.length).replace(/^\/+|\/+$/g, '');
  return { parts: path ? path.split('/').map(decodeURIComponent) : [], query: new URLSearchParams(location.search) };
}
export function go(path, replace = false) {
  history[replace ? 'replaceState' : 'pushState'](null, '', BASE + path);
  for (const visit of visitors) visit();
}
addEventListener('popstate', () => { for (const visit of visitors) visit(); });
addEventListener('click', (event) => {
  const link = event.target.closest?.('a[href^="/console"]');
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target) return;
  event.preventDefault();
  go(link.getAttribute('href').slice(BASE.length));
});
export function usePlace() {
  useChanges(visitors);
  return place();
}
export const to = (...parts) => BASE + '/' + parts.map(encodeURIComponent).join('/');

// --------------------------------------------------------------------------------------- hooks

/** Draws the component again whenever the listeners are called. They include it before anything else can happen: other effects run
    after the next frame, and an answer that comes earlier would change what the component has drawn and not tell it. */
export function useChanges(listeners) {
  const [, turn] = useState(0);
  useLayoutEffect(() => { const listener = () => turn((n) => n + 1); listeners.add(listener); return () => listeners.delete(listener); }, []);
}

export function useSession() {
  useChanges(listeners);
  return session;
}

/** Loads, and loads again every so often; keeps what it has while it does. */
export function useLoaded(load, inputs, everyMs = 0) {
  const [state, set] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    let alive = true, timer = 0;
    const control = new AbortController();
    const turn = async () => {
      clearTimeout(timer);
      try {
        const data = await load(control.signal);
        if (alive) set({ data, error: null });
      } catch (error) {
        if (alive && error.name !== 'AbortError') set((old) => ({ data: old.data, error }));
      }
      if (alive && everyMs && !document.hidden) timer = setTimeout(turn, everyMs);
    };
    const seen = () => { if (!document.hidden && everyMs) turn(); };
    document.addEventListener('visibilitychange', seen);
    again.current = turn;
    set((old) => (old.data === null ? old : { data: old.data, error: null }));
    turn();
    return () => { alive = false; control.abort(); clearTimeout(timer); document.removeEventListener('visibilitychange', seen); };
  }, inputs);
  return { ...state, reload: () => again.current() };
}

/** An action of a button: busy while it runs, and what came of it. */
export function useAction(act) {
  const [state, set] = useState({ busy: false, error: null, done: null });
  const run = async (...given) => {
    set({ busy: true, error: null, done: null });
    try {
      const done = await act(...given);
      set({ busy: false, error: null, done: done ?? true });
      return done;
    } catch (error) { set({ busy: false, error, done: null }); return undefined; }
  };
  return { ...state, run, clear: () => set({ busy: false, error: null, done: null }) };
}

// ------------------------------------------------------------------------------------- formats

export const num = (value, digits = 0) => (value === null || value === undefined || Number.isNaN(value) ? '–' : Number(value).toLocaleString('en-US', { maximumFractionDigits: digits }));
export const ms = (value) => (value === null || value === undefined ? '–' : value >= 10000 ? `${num(value / 1000, 1)} s` : value >= 100 ? `${num(value)} ms` : value >= 1 ? `${num(value, 1)} ms` : `${num(value * 1000)} µs`);
export const pct = (part, digits = 1) => (part === null || part === undefined || Number.isNaN(part) ? '–' : `${num(100 * part, digits)} %`);
export const mib = (value) => (value >= 1024 ? `${num(value / 1024, 1)} GiB` : `${num(value)} MiB`);
export const cost = (value) => (!value ? '0' : value >= 100 ? num(value) : value >= 1e-6 ? String(Number(value.toPrecision(value >= 1e-3 ? 3 : 2))) : value.toExponential(1));
export const when = (us) => (us ? html`<time class="nowrap" datetime=${new Date(us / 1000).toISOString()}>${new Date(us / 1000).toLocaleString('en-GB', { day: 'numeric', month: 'short', ...(Date.now() - us / 1000 > 15e9 && { year: 'numeric' }), hour: '2-digit', minute: '2-digit', second: '2-digit' })}</time>` : '–');
export const span = (us) => (us >= 120e6 ? `${num(us / 60e6, 1)} min` : us >= 1e6 ? `${num(us / 1e6, 1)} s` : ms(us / 1000));
export const ago = (millis) => (millis < 1000 ? 'now' : millis < 120e3 ? `${num(millis / 1000)} s ago` : millis < 7200e3 ? `${num(millis / 60e3)} min ago` : `${num(millis / 3600e3)} h ago`);

const shades = new Map(), taken = Array(10).fill(0), ORDER = [0, 1, 2, 3, 5, 6, 8, 9, 4, 7], FIRST = 8;
/** The colour of a function, the same in every view and after a reload: by its name, and the next free one where two names meet. */
export function shade(name) {
  const known = shades.get(name);
  if (known !== undefined) return known;
  let at = 0;
  for (let place = 0; place < Math.min(64, name.length); place += 1) at = (31 * at + name.charCodeAt(place)) % 9973;
  at %= FIRST;  // red and grey say other things too: they come last
  for (let step = 0, least = Math.min(...taken); step < 10 && taken[ORDER[at]] > least; step += 1) at = (at + 1) % 10;
  taken[ORDER[at]] += 1;
  shades.set(name, ORDER[at]);
  return ORDER[at];
}
export const hasShade = (name) => shades.has(name);
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --------------------------------------------------------------------------------------- parts

export const Swatch = ({ name }) => html`<span class=${`swatch f${shade(name)}`}></span>`;
export const FunctionName = ({ name }) => html`<span class="nowrap">${hasShade(name) && html`<${Swatch} name=${name} />`}<a href=${to('functions', name)} class="clip" title=${name.length > 30 ? name.slice(0, 300) : undefined}>${name.slice(0, 120)}</a></span>`;

export function Oops({ error, retry }) {
  if (!error) return null;
  const what = error.status === 403 ? 'This is not yours to see' : error.status === 404 ? 'Not there' : error.status === 0 ? 'No answer' : 'That did not work';
  return html`<div class="note bad" role="alert"><p><strong>${what}.</strong> ${error.message}</p>
    ${error.hint && html`<p class="soft">${error.hint}</p>`}${error.body?.leader && html`<p>The server that leads: <code>${error.body.leader}</code></p>`}
    ${retry && html`<p><button onClick=${retry}>Try again</button></p>`}</div>`;
}
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Head = ({ title, children, about }) => html`<div class="head"><h1>${typeof title === 'string' ? title.slice(0, 120) : title}</h1><span class="grow"></span>${children}${about && html`<p>${about}</p>`}</div>`;

/** Columns: [title, cell of a row, class]. A row with an address opens by click, and its first cell is a link. */
export function Table({ label, columns, rows, href, empty, chosen }) {
  if (!rows) return html`<p class="soft">Loading.</p>`;
  if (!rows.length) return html`<${Empty}>${empty || 'Nothing here yet.'}<//>`;
  const open = (event, row) => { if (href && !event.target.closest('a,button,input')) go(href(row).slice(BASE.length)); };
  return html`<div class="wide" tabindex="0" role="region" aria-label=${label}><table><caption class="vh">${label}</caption>
    <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind || ''}>${title || html`<span class="vh">more</span>`}</th>`)}</tr></thead>
    <tbody>${rows.map((row, place) => html`<tr key=${row.key ?? place} data-href=${href ? href(row) : undefined} class=${chosen?.(row) ? 'chosen' : ''} onClick=${(event) => open(event, row)}>
      ${columns.map(([, cell, kind], at) => html`<td class=${kind || ''}>${at === 0 && href ? html`<a href=${href(row)}>${cell(row)}</a>` : cell(row)}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** Buttons to turn pages; nothing where one page holds all. */
export function Pager({ from, size, total, onChange }) {
  if (total <= size) return null;
  return html`<p class="row"><button disabled=${!from} onClick=${() => onChange(Math.max(0, from - size))}>Before</button><span class="soft">${num(from + 1)} to ${num(Math.min(total, from + size))} of ${num(total)}</span><button disabled=${from + size >= total} onClick=${() => onChange(from + size)}>After</button></p>`;
}

/** Options of a select: texts, or pairs of a value and a text. */
export const Options = ({ of, value }) => of.map((one) => { const [key, text] = Array.isArray(one) ? one : [one, one]; return html`<option value=${key} selected=${key === value}>${text}</option>`; });

export function Segments({ label, value, options, onChange }) {
  return html`<span class="seg" role="group" aria-label=${label}>${options.map(([key, text]) => html`<button type="button" aria-pressed=${String(key === value)} onClick=${() => onChange(key)}>${text}</button>`)}</span>`;
}
export function Meter({ part, goal = 0, kind = goal && part < goal ? (part < goal - 0.1 ? 'bad' : 'warn') : '' }) {
  const bar = useRef();
  useEffect(() => { if (bar.current) bar.current.style.width = `${Math.max(0, Math.min(100, 100 * (part || 0)))}%`; }, [part]);
  return html`<span class="nowrap"><span class=${`meter ${kind}`}><i ref=${bar}></i></span>${pct(part)}</span>`;
}
export const Facts = ({ of }) => html`<dl class="facts">${of.filter(Boolean).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** A bar of parts: [label, size, class]. */
export function Bar({ parts, total, label }) {
  const box = useRef();
  useEffect(() => { [...box.current.children].forEach((one, place) => { one.style.width = `${(100 * parts[place][1]) / (total || 1)}%`; }); });
  return html`<div class="bar" role="img" aria-label=${label} ref=${box}>${parts.map(([name, , kind]) => html`<i class=${kind} title=${name}></i>`)}</div>`;
}

/** Lines over time. Series: [label, colour variable]; data: [seconds, ...values]. A table with the last values stands beside. */
export function Chart({ label, series, data, height = 190, unit = '' }) {
  const canvas = useRef();
  const scheme = useScheme();
  useEffect(() => {
    drawLines(canvas.current, series, data, height);
    const watch = new ResizeObserver(() => drawLines(canvas.current, series, data, height));
    watch.observe(canvas.current);
    return () => watch.disconnect();
  }, [scheme, data]);
  const last = data[0].length - 1;
  return html`<div><canvas class="chart" ref=${canvas} role="img" aria-label=${label}></canvas>
    <ul class="legend">${series.map(([text, name], at) => html`<li><span class=${`swatch f${name.slice(3)}`}></span>${text}: <strong>${last >= 0 ? num(data[at + 1][last], 1) : '–'}</strong>${unit && ` ${unit}`}</li>`)}</ul>
    <details><summary>As a table</summary><${Table} label=${label} columns=${[['time', (row) => new Date(data[0][row] * 1000).toLocaleTimeString('en-GB')], ...series.map(([text], at) => [text, (row) => num(data[at + 1][row], 2), 'n'])]}
      rows=${Array.from({ length: Math.min(30, last + 1) }, (_, at) => last - at)} /></details></div>`;
}

/** A round number of at least a third of the size. */
function tick(size) {
  const power = 10 ** Math.floor(Math.log10(size / 3 || 1));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= size / 4) || power;
}

function drawLines(canvas, series, [times, ...values], height) {
  const ratio = Math.min(2, window.devicePixelRatio || 1), wide = canvas.clientWidth || 400, left = 52, bottom = 22, top = 8;
  canvas.width = Math.round(wide * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = canvas.getContext('2d');
  paint.scale(ratio, ratio);
  const most = Math.max(1, ...values.map((line) => line.reduce((high, value) => Math.max(high, value || 0), 0))) * 1.06, step = tick(most);
  const begin = times[0] ?? 0, end = Math.max(begin + 1, times[times.length - 1] ?? 1);
  const x = (time) => left + ((wide - left - 8) * (time - begin)) / (end - begin), y = (value) => top + (height - top - bottom) * (1 - value / most);
  paint.font = '12px system-ui';
  paint.textAlign = 'right';
  for (let value = 0; value <= most; value += step) {
    paint.fillStyle = colour('--grid');
    paint.fillRect(left, Math.round(y(value)), wide - left - 8, 1);
    paint.fillStyle = colour('--soft');
    paint.fillText(num(value, 2), left - 8, y(value) + 4);
  }
  paint.textAlign = 'center';
  const marks = Math.max(1, Math.min(6, Math.floor(wide / 130)));
  for (let mark = 0; mark <= marks && times.length > 1; mark += 1) {
    const time = begin + ((end - begin) * mark) / marks;
    paint.fillText(new Date(time * 1000).toLocaleTimeString('en-GB'), Math.max(left + 22, Math.min(wide - 30, x(time))), height - 5);
  }
  series.forEach(([, name], at) => {
    paint.strokeStyle = colour(name);
    paint.lineWidth = 1.8;
    paint.lineJoin = 'round';
    paint.beginPath();
    let isOn = false;
    values[at].forEach((value, place) => {
      if (value === null || value === undefined) { isOn = false; return; }
      paint[isOn ? 'lineTo' : 'moveTo'](x(times[place]), y(value));
      isOn = true;
    });
    paint.stroke();
  });
}

// -------------------------------------------------------------------------------------- scheme

const dark = matchMedia('(prefers-color-scheme: dark)');
const schemeWatchers = new Set();
dark.addEventListener('change', () => { for (const watch of schemeWatchers) watch(); });
export function setScheme(name) {
  if (name === 'auto') delete document.documentElement.dataset.scheme; else document.documentElement.dataset.scheme = name;
  try { localStorage.setItem('scheme', name); } catch { /* it lasts as long as the page */ }
  for (const watch of schemeWatchers) watch();
}
export const schemeName = () => document.documentElement.dataset.scheme || 'auto';
export function useScheme() {
  const [, turn] = useState(0);
  useEffect(() => { const watch = () => turn((n) => n + 1); schemeWatchers.add(watch); return () => schemeWatchers.delete(watch); }, []);
  return document.documentElement.dataset.scheme || (dark.matches ? 'dark' : 'light');
}
try { const kept = localStorage.getItem('scheme'); if (kept === 'dark' || kept === 'light') setScheme(kept); } catch { /* none */ }
