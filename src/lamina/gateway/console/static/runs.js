// Durable runs: list, graph, timeline, journal and values; start, cancel and retry.
import { html, useState, useEffect, useMemo, useRef } from './vendor/preact.js';
import dagre from './vendor/dagre.js';
import { Empty, Facts, Head, Oops, Options, Pager, Table, ago, cost, api, go, ms, num, request, span, to, useAction, useLoaded, when } from './lib.js';
import { Answer, InputFields, encode, readAnswer } from './forms.js';

const STATES = ['queued', 'running', 'succeeded', 'failed', 'cancelled', 'quarantined'];
const KIND = { succeeded: 'good', running: '', queued: '', failed: 'bad', cancelled: 'warn', quarantined: 'bad' };
const OVER = ['succeeded', 'failed', 'cancelled', 'quarantined'];
const LAID_OUT = 160, DRAWN = 600, LANES = 60, ROWS = 200;

export function Runs({ parts, query }) {
  if (parts[0] === 'new') return html`<${NewRun} name=${parts[1]} />`;
  if (parts[0]) return html`<${RunPage} key=${parts[0]} id=${parts[0]} />`;
  return html`<${RunList} query=${query} />`;
}

function RunList({ query }) {
  const state = query.get('state') || '', target = query.get('target') || '', before = query.get('before') || '';
  const turn = (changes) => go(`/runs?${new URLSearchParams(Object.entries({ state, target, ...changes }).filter(([, value]) => value))}`);
  const { data, error, reload } = useLoaded((signal) => api('GET', `/calls/v1/runs?${new URLSearchParams(Object.entries({ state, target, before, limit: 50 }).filter(([, value]) => value))}`, undefined, { signal }), [state, target, before], 2000);
  return html`<${Head} title="Runs" about="Durable runs: accepted once they are on disk, and carried on after a restart."><a class="button" href=${to('runs', 'new')}>Start a run</a><//>
    <div class="row filter"><label class="inline"><span>State</span><select value=${state} onChange=${(event) => turn({ state: event.target.value })}><${Options} value=${state} of=${[['', 'all'], ...STATES]} /></select></label>
      <label class="inline"><span>Workflow</span><input value=${target} onChange=${(event) => turn({ target: event.target.value })} /></label></div>
    <${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Runs" rows=${data?.runs ?? (error ? [] : null)} href=${(one) => to('runs', one.id)} empty="No such run. Start one here, or call a workflow with Prefer: respond-async." columns=${[['run', (one) => html`<span class="mono">${one.id.slice(0, 12)}</span>`], ['workflow', (one) => one.target], ['state', (one) => html`<span class=${`tag ${KIND[one.state]}`}>${one.state}</span>`], ['accepted', (one) => ago(Date.now() - one.created_us / 1000), 'nowrap'], ['took', (one) => (one.ended_us ? span(one.ended_us - one.created_us) : '–'), 'n'], ['tenant', (one) => one.tenant || '–'], ['retries', (one) => one.retries || 0, 'n']]} />
    <p class="row">${before && html`<button onClick=${() => history.back()}>Newer</button>`}${data?.next && html`<button onClick=${() => turn({ before: data.next })}>Older</button>`}</p></section>`;
}

function NewRun({ name }) {
  const { data, error, reload } = useLoaded(async (signal) => (await Promise.all(['workflows', 'functions'].map((kind) => api('GET', `/calls/v1/${kind}`, undefined, { signal })))).flat(), []);
  const [values, setValues] = useState({}), [key, setKey] = useState('');
  const target = data?.find((one) => one.name === name);
  const start = useAction(async () => {
    const given = encode(target.inputs, values);
    given.headers.prefer = 'respond-async';
    if (key) given.headers['idempotency-key'] = key;
    const answer = await readAnswer(await request('POST', `/calls/v1/${target.kind}s/${target.name}`, given));
    go(`/runs/${JSON.parse(answer.text).id}`);
  });
  return html`<${Head} title="Start a run" /><${Oops} error=${error} retry=${reload} />
    <section class="card"><form class="fields" onSubmit=${(event) => { event.preventDefault(); start.run(); }}>
      <label><span>Workflow or function</span><select value=${name || ''} onChange=${(event) => go(to('runs', 'new', event.target.value).slice('/console'.length))}><${Options} value=${name || ''} of=${[['', 'choose'], ...(data || []).slice(0, 500).map((one) => [one.name, `${one.name} (${one.kind})`])]} /></select></label>
      ${target && html`${target.doc && html`<p class="soft">${target.doc}</p>`}<${InputFields} inputs=${target.inputs} values=${values} setValues=${setValues} /><label><span>Idempotency key, optional: the same key starts no second run</span><input value=${key} onInput=${(event) => setKey(event.target.value)} /></label>`}
      <${Oops} error=${start.error} /><p><button class="main" disabled=${!target || start.busy}>Start</button></p></form></section>`;
}

// ----------------------------------------------------------------------------------- one run

function RunPage({ id }) {
  const [isOver, setOver] = useState(false);
  const { data, error, reload } = useLoaded(async (signal) => {
    const run = await api('GET', `/calls/v1/runs/${id}`, undefined, { signal });
    const over = OVER.includes(run.state);
    const [told, now] = await Promise.all([api('GET', `/calls/v1/runs/${id}/history?values=1`, undefined, { signal }), over ? null : api('GET', `/calls/v1/explain/${id}`, undefined, { signal }).catch(() => null)]);
    setOver(over);
    return { run, events: told.events, now };
  }, [id, isOver], isOver ? 0 : 1000);
  const graph = useLoaded((signal) => (data ? api('GET', `/v1/console/graph/${encodeURIComponent(data.run.target)}`, undefined, { signal }).catch(() => null) : null), [data?.run.target]);
  const act = useAction(async (what) => { await api('POST', `/calls/v1/runs/${id}/${what}`); setOver(false); reload(); });
  if (!data) return html`<${Head} title=${`Run ${id.slice(0, 24)}`} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const { run, events, now } = data;
  return html`<${Head} title=${html`Run <span class="mono">${id.slice(0, 12)}</span> of ${run.target}`}><span class=${`tag ${KIND[run.state]}`}>${run.state}</span>
      ${!isOver && html`<button class="danger" disabled=${act.busy} onClick=${() => act.run('cancel')}>Cancel</button>`}
      ${['failed', 'quarantined', 'cancelled'].includes(run.state) && html`<button disabled=${act.busy} onClick=${() => act.run('retry')}>Retry from where it failed</button>`}<a class="button" href=${to('runs', 'new', run.target)}>Start another</a><//>
    <${Oops} error=${error} retry=${reload} /><${Oops} error=${act.error} />
    ${run.problem && html`<div class="note bad"><p><strong>${run.problem.title || 'It failed'}.</strong> ${run.problem.detail}</p>${run.problem.step && html`<p>In step ${run.problem.step}.</p>`}${run.problem.hint && html`<p class="soft">${run.problem.hint}</p>`}${run.problem.trace && html`<details><summary>Trace</summary><pre>${run.problem.trace}</pre></details>`}</div>`}
    <section class="card"><${Facts} of=${[['accepted', when(run.created_us)], run.began_us && ['began', when(run.began_us)], run.ended_us && ['took', span(run.ended_us - run.created_us)], run.cost !== undefined && ['cost', cost(run.cost)], run.tenant && ['tenant', run.tenant], run.retries && ['retries', run.retries]]} /></section>
    <section class="card"><h2>Graph</h2>${graph.data ? html`<${Graph} graph=${graph.data} events=${events} now=${now} run=${run} />` : html`<${Empty}>${data.run.kind === 'function' ? 'A function is one step.' : 'The graph is not known: its workflow may have been replaced.'}<//>`}</section>
    <section class="card"><h2>Timeline</h2><${Timeline} events=${events} run=${run} /></section>
    <section class="card"><h2>Result</h2><${Result} id=${id} state=${run.state} /></section>
    <section class="card"><h2>Journal <span class="soft">${num(events.length)} entries</span></h2><${Journal} events=${events} /></section>`;
}

function Result({ id, state }) {
  const load = useAction(async () => readAnswer(await request('GET', `/calls/v1/runs/${id}/result`)));
  useEffect(() => { if (state === 'succeeded') load.run(); }, [state]);
  return state !== 'succeeded' ? html`<${Empty}>There is none${OVER.includes(state) ? `: the run is ${state}.` : ' yet.'}<//>` : html`<${Oops} error=${load.error} />${load.done && html`<${Answer} answer=${load.done} />`}`;
}

function Journal({ events }) {
  const [from, setFrom] = useState(0);
  return html`<${Table} label="Journal" rows=${events.slice(from, from + ROWS)} columns=${[['when', (one) => when(one.ended_us || one.at_us)], ['what', (one) => one.kind], ['step', (one) => one.step || '–'], ['ended', (one) => (one.ok === undefined ? one.state || '' : one.ok ? 'done' : html`<span class="bad-text">${one.error || 'failed'}</span>`)], ['queued', (one) => (one.began_us && one.queued_us ? ms((one.began_us - one.queued_us) / 1000) : '–'), 'n'], ['ran', (one) => (one.began_us && one.ended_us ? ms((one.ended_us - one.began_us) / 1000) : '–'), 'n'], ['slice', (one) => one.slice || '–'], ['batch', (one) => one.batch ?? '–', 'n'], ['value', (one) => (one.value === undefined ? '' : html`<code class="clip" title=${String(one.value).slice(0, 2000)}>${String(one.value).slice(0, 300)}</code>`)]]} />
    <${Pager} from=${from} size=${ROWS} total=${events.length} onChange=${setFrom} />`;
}

function Timeline({ events, run }) {
  const box = useRef();
  const lanes = useMemo(() => {
    const found = new Map();
    for (const one of events) if (one.step) { if (!found.has(one.step)) found.set(one.step, []); found.get(one.step).push(one); }
    return [...found];
  }, [events]);
  const begin = run.created_us, end = Math.max(run.ended_us || 0, ...events.slice(-1).map((one) => one.ended_us || one.at_us), begin + 1);
  const shown = lanes.slice(0, LANES);
  let left = 2000;
  const marks = shown.map(([name, all]) => { const some = all.slice(0, Math.max(0, left)); left -= some.length; return [name, some, all]; });
  useEffect(() => {
    for (const mark of box.current?.querySelectorAll('i') || []) { mark.style.left = `${(100 * (mark.dataset.from - begin)) / (end - begin)}%`; mark.style.width = `${Math.max(0.15, (100 * (mark.dataset.to - mark.dataset.from)) / (end - begin))}%`; }
  });
  if (!lanes.length) return html`<${Empty}>No step has ended yet.<//>`;
  return html`<div class="lanes" ref=${box}>${marks.map(([name, some, all]) => html`<span class="name" title=${name}>${name}${all.length > 1 ? html` <span class="soft">× ${num(all.length)}</span>` : ''}</span>
    <div class="lane" role="img" aria-label=${`${name}: ${all.length} times`}>${some.map((one) => html`${one.began_us && one.queued_us && one.kind === 'step' && html`<i class="queue" data-from=${one.queued_us} data-to=${one.began_us}></i>`}<i class=${one.kind !== 'step' ? 'wait' : one.ok ? '' : 'failed'} data-from=${one.began_us || one.queued_us || one.at_us} data-to=${one.ended_us || one.at_us} title=${`${one.step}: ${one.kind === 'step' ? (one.ok ? 'done' : one.error) : one.kind}`}></i>`)}</div>
    <span class="n">${span(all.reduce((sum, one) => sum + ((one.ended_us || one.at_us) - (one.began_us || one.queued_us || one.at_us)), 0))}</span>`)}</div>
    <div class="lanes axis" aria-hidden="true"><span></span><span class="ticks">${[0, 0.25, 0.5, 0.75, 1].map((part) => html`<span>${part ? span(part * (end - begin)) : '0'}</span>`)}</span><span></span></div>
    <p class="soft small">From ${when(begin)} on. A thin line is time in a queue; red failed; at the right, time on slices in all.${lanes.length > LANES && ` ${num(lanes.length - LANES)} more steps are in the journal below.`}</p>`;
}

// ------------------------------------------------------------------------------------- graph

/** One graph of all levels: what is inside of a group follows it, and leads to what follows the group. */
function flatten(graph, prefix, boxes, edges) {
  const ends = new Map();
  for (const box of graph.boxes) {
    const id = prefix + box.name;
    boxes.push({ id, name: box.name, kind: box.kind, lines: box.lines });
    let last = [id];
    for (const [at, inner] of box.inner.entries()) {
      const found = flatten(inner, `${id}/${at}/`, boxes, edges);
      for (const first of found.first) edges.push({ from: id, to: first, label: '', is_error: false });
      last = at ? [...last, ...found.last] : found.last;
    }
    ends.set(box.name, { id, last: last.length ? last : [id] });
  }
  const entered = new Set(), left = new Set();
  for (const edge of graph.edges) {
    const start = ends.get(edge.from), end = ends.get(edge.to);
    if (!start || !end) continue;
    for (const from of edge.is_error ? [start.id] : start.last) edges.push({ from, to: end.id, label: edge.label, is_error: edge.is_error });
    entered.add(edge.to);
    left.add(edge.from);
  }
  const names = graph.boxes.map((box) => box.name);
  return { first: names.filter((name) => !entered.has(name)).map((name) => ends.get(name).id), last: names.filter((name) => !left.has(name)).flatMap((name) => ends.get(name).last) };
}

function layOut(boxes, edges) {
  const width = (box) => Math.max(84, 26 + 7.2 * Math.min(26, Math.max(box.name.length, ...box.lines.map((line) => line.length * 0.86)))), height = (box) => 30 + 15 * Math.max(box.lines.length, box.id.includes('/') ? 1 : 0);
  if (boxes.length <= LAID_OUT) {
    const graph = new dagre.graphlib.Graph({ multigraph: true });
    graph.setGraph({ rankdir: 'LR', nodesep: 18, ranksep: 46, marginx: 8, marginy: 8 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const box of boxes) graph.setNode(box.id, { width: width(box), height: height(box) });
    edges.forEach((edge, at) => graph.setEdge(edge.from, edge.to, {}, String(at)));
    dagre.layout(graph);
    return { at: new Map(boxes.map((box) => [box.id, graph.node(box.id)])), lines: edges.map((edge, at) => graph.edge({ v: edge.from, w: edge.to, name: String(at) }).points), width: graph.graph().width, height: graph.graph().height };
  }
  const rank = new Map(boxes.map((box) => [box.id, 0])), after = new Map(), open = new Map(boxes.map((box) => [box.id, 0]));
  for (const edge of edges) { if (!after.has(edge.from)) after.set(edge.from, []); after.get(edge.from).push(edge.to); open.set(edge.to, open.get(edge.to) + 1); }
  const todo = boxes.filter((box) => !open.get(box.id)).map((box) => box.id);
  while (todo.length) { const id = todo.pop(); for (const next of after.get(id) || []) { rank.set(next, Math.max(rank.get(next), rank.get(id) + 1)); open.set(next, open.get(next) - 1); if (!open.get(next)) todo.push(next); } }
  const rows = new Map(), at = new Map();
  const wrap = 8;
  for (const box of boxes) {
    const place = rank.get(box.id), column = place % wrap, line = Math.floor(place / wrap), row = rows.get(place) || 0;
    rows.set(place, row + 1);
    at.set(box.id, { x: 95 + column * 200, y: 30 + line * 64 + row * 52, width: Math.min(170, width(box)), height: height(box) });
  }
  const size = [...at.values()];
  return { at, lines: edges.map((edge) => [at.get(edge.from), at.get(edge.to)]), width: 200 * wrap + 20, height: Math.max(...size.map((one) => one.y)) + 50 };
}

function Graph({ graph, events, now, run }) {
  const { boxes, edges, left } = useMemo(() => { const boxes = [], edges = []; flatten(graph, '', boxes, edges); return { boxes: boxes.slice(0, DRAWN), edges: edges.filter(((kept) => (edge) => kept.has(edge.from) && kept.has(edge.to))(new Set(boxes.slice(0, DRAWN).map((box) => box.id)))), left: boxes.length - DRAWN }; }, [graph]);
  const laid = useMemo(() => layOut(boxes, edges), [boxes, edges]);
  const seen = new Map();
  for (const one of events) if (one.step) { const state = seen.get(one.step) || { done: 0, failed: 0, running: 0, waiting: 0 }; if (one.kind === 'step') state[one.ok ? 'done' : 'failed'] += 1; seen.set(one.step, state); }
  for (const step of now?.steps || []) if (step.ended_ms === undefined) { const state = seen.get(step.step) || { done: 0, failed: 0, running: 0, waiting: 0 }; state.running += step.jobs; seen.set(step.step, state); }
  for (const step of now?.waiting || []) { const state = seen.get(step.step) || { done: 0, failed: 0, running: 0, waiting: 0 }; state.waiting += 1; seen.set(step.step, state); }
  const over = run.state === 'succeeded';
  const group = (box) => boxes.filter((one) => one.id.startsWith(`${box.id}/`)).map((one) => seen.get(one.name)).filter(Boolean);
  const inside = (box) => { const all = boxes.length <= LAID_OUT && box.kind !== 'task' ? group(box) : []; return !all.length ? '' : all.some((one) => one.running || one.waiting) ? 'running' : all.some((one) => one.failed && !one.done) ? 'failed' : 'done'; };
  const look = (box) => { const state = seen.get(box.name) ; return !state ? inside(box) || (over && box.kind === 'task' && boxes.length === 1 ? 'done' : '') : state.running ? 'running' : state.failed && !state.done ? 'failed' : state.waiting ? 'waiting' : 'done'; };
  const count = (box) => { const state = seen.get(box.name); return state && state.done + state.failed + state.running + state.waiting > 1 ? `${state.done} done${state.running ? `, ${state.running} running` : ''}${state.waiting ? `, ${state.waiting} waiting` : ''}${state.failed ? `, ${state.failed} failed` : ''}` : ''; };
  const path = (points) => `M${points.map((one) => `${one.x.toFixed(1)},${one.y.toFixed(1)}`).join('L')}`;
  return html`<div class="graph" tabindex="0" role="region" aria-label="Graph of the run"><svg width=${laid.width} height=${laid.height} role="img" aria-label=${`${boxes.length} steps; the timeline has the same`}><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="tip-of" d="M0,0L8,4L0,8z" /></marker></defs>
    ${edges.map((edge, at) => html`<path class=${edge.is_error ? 'error' : ''} marker-end="url(#tip)" d=${path(laid.lines[at])} />`)}
    ${boxes.map((box) => { const { x, y, width, height } = laid.at.get(box.id); const lines = [count(box), ...box.lines].filter(Boolean).slice(0, Math.max(1, box.lines.length)); return html`<g class=${look(box)}><title>${box.name}</title><rect x=${x - width / 2} y=${y - height / 2} width=${width} height=${height} rx="5" />
      <text x=${x} y=${y - 7 * lines.length + 4} text-anchor="middle">${box.name.length > 26 ? `${box.name.slice(0, 25)}…` : box.name}</text>${lines.map((line, row) => html`<text class="sub" x=${x} y=${y - 7 * lines.length + 19 + 14 * row} text-anchor="middle">${line.slice(0, 32)}</text>`)}</g>`; })}</svg></div>
    <p class="legend"><span class="tag good">done</span><span class="tag info">running</span><span class="tag warn">waits</span><span class="tag bad">failed</span><span class="tag">not begun</span>${left > 0 && html`<span class="soft">${num(left)} more steps are not drawn; the journal has them.</span>`}</p>`;
}
