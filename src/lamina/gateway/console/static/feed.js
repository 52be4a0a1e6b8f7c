// The event feed: batches as they start and end, and a pulse once a second. Read with fetch, for the token is a header.
import { request, failure, session, onSession, useChanges, shade, visible } from './lib.js';

const KEPT_US = 62e6, KEPT = 120000, HISTORY = 600, WATCHED = 60, HIDDEN_MS = 30000;

export const live = { state: 'connecting', error: null, pulse: null, history: [], batches: new Map(), open: new Map(), offset: null, leftOut: 0, seen: 0 };
const watchers = new Set();
const ended = new Set();
export const onEnded = (watch) => { ended.add(watch); return () => ended.delete(watch); };
function tell() { for (const watch of watchers) watch(); }

export function useLive() {
  useChanges(watchers);
  return live;
}

/** The server's clock now, in microseconds, a little behind: what happens is told ten times a second. */
export const serverNow = () => (live.offset === null ? 0 : performance.now() * 1000 + live.offset - 250000);

function clock(now) {
  const offset = now - performance.now() * 1000;
  live.offset = live.offset === null || Math.abs(offset - live.offset) > 1e6 ? offset : live.offset + 0.1 * (offset - live.offset);
}

function forget() {
  live.open.clear();
  live.batches.clear();
  live.leftOut = 0;
  for (const watch of ended) watch(null);
}

export function onFrame(frame) {
  clock(frame.now);
  live.leftOut += frame.left_out;
  for (const [id, device, first, units, name, at, predicted, jobs, behind] of frame.started) {
    const before = behind ? live.open.get(behind) : null;
    live.open.set(id, { id, device, first, units, name, begin: before ? before.begin + before.predicted : at, decided: at, predicted, jobs, behind: before ? behind : 0, end: 0, error: '' });
    live.seen += 1;
  }
  for (const [id, at, took, error] of frame.finished) {
    const batch = live.open.get(id);
    if (!batch) continue;
    live.open.delete(id);
    batch.begin = batch.behind || batch.begin > at ? Math.max(batch.decided, at - took) : batch.begin;
    batch.behind = 0;
    batch.end = at;
    batch.took = took;
    batch.error = error;
    let kept = live.batches.get(batch.device);
    if (!kept) live.batches.set(batch.device, (kept = []));
    kept.push(batch);
    for (const watch of ended) watch(batch);
    for (const other of live.open.values()) if (other.behind === id) { other.behind = 0; other.begin = at; }
  }
}

export function onPulse(pulse) {
  clock(pulse.now);
  const last = live.history[live.history.length - 1];
  const sum = [0, 0, 0, 0];
  for (const target of pulse.targets) target.total.forEach((count, at) => { sum[at] += count; });
  const seconds = last ? pulse.wall - last.wall : 0;
  const rate = last && seconds > 0.2 && seconds < 10 ? sum.map((count, at) => Math.max(0, (count - last.sum[at]) / seconds)) : [null, null, null, null];
  for (const name of pulse.functions.map((one) => one.name).sort()) shade(name);
  const totals = new Map(pulse.targets.slice(0, WATCHED).map((target) => [target.name, target.total]));
  live.history.push({ totals, wall: pulse.wall, sum, rate, queued: pulse.queued, calls: pulse.calls, held: Object.fromEntries(pulse.devices.map((one) => [one.id, one.held])) });
  if (live.history.length > HISTORY) live.history.splice(0, live.history.length - HISTORY);
  live.pulse = pulse;
  const running = new Set(pulse.devices.flatMap((device) => device.running));
  for (const [id, batch] of live.open) if (!running.has(id) && !batch.behind && pulse.now - batch.decided > 3e6) live.open.delete(id);
  for (const kept of live.batches.values()) {
    let drop = Math.max(0, kept.length - KEPT);
    while (drop < kept.length && kept[drop].end < pulse.now - KEPT_US) drop += 1;
    if (drop) kept.splice(0, drop);
  }
  tell();
}

function parse(text, state) {
  state.rest += text;
  for (let end = state.rest.indexOf('\n\n'); end >= 0; end = state.rest.indexOf('\n\n')) {
    const fields = {};
    for (const line of state.rest.slice(0, end).split('\n')) { const colon = line.indexOf(': '); fields[line.slice(0, colon)] = line.slice(colon + 2); }
    state.rest = state.rest.slice(end + 2);
    if (fields.id) state.id = fields.id;
    if (fields.event === 'frame') onFrame(JSON.parse(fields.data));
    else if (fields.event === 'pulse') onPulse(JSON.parse(fields.data));
    else if (fields.event === 'gap') forget();
  }
}

function set(state, error = null) { live.state = state; live.error = error; tell(); }

export function connect() {
  const state = { rest: '', id: '' };
  let control = null, hidden = 0, wait = 500, timer = 0;
  const begin = async () => {
    clearTimeout(timer);
    control?.abort();
    const mine = control = new AbortController();
    state.rest = '';
    try {
      const response = await request('GET', '/v1/console/feed', { signal: mine.signal, headers: state.id ? { 'last-event-id': state.id } : {} });
      if (!response.ok) {
        const error = await failure(response);
        set(error.status === 403 || error.status === 401 ? 'forbidden' : 'lost', error);
        if (live.state === 'lost') timer = setTimeout(begin, (wait = Math.min(8000, wait * 1.7)));
        return;
      }
      set('live');
      wait = 500;
      const reader = response.body.getReader(), decoder = new TextDecoder();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        parse(visible(decoder.decode(value, { stream: true })), state);
      }
    } catch (error) { if (mine !== control || mine.signal.aborted) return; }
    if (mine === control) { set('lost'); timer = setTimeout(begin, (wait = Math.min(8000, wait * 1.7))); }
  };
  document.addEventListener('visibilitychange', () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(() => { control?.abort(); set('resting'); }, HIDDEN_MS);
    else if (live.state === 'resting') begin();
  });
  onSession(() => { if (session.caller && live.state !== 'live') begin(); else if (session.needsToken) { control?.abort(); state.id = ''; } });
  begin();
}
