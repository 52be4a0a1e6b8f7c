// Calls and refusals: the last ones, and all that was decided about one of them.
import { html, useState, useEffect, useRef } from './vendor/preact.js';
import { useLive } from './feed.js';
import { Facts, FunctionName, Head, Meter, Oops, Segments, Table, ago, api, cost, go, ms, num, pct, to, useAction, useLoaded } from './lib.js';
import { Outcome } from './plan.js';

const KIND = { 'in time': 'good', late: 'warn', refused: 'bad', failed: 'bad' };
const REASONS = { deadline: 'would have been late', cost: 'would have cost more than its limit', 'queue-full': 'the queue was full', overloaded: 'the server itself had too much to do', quota: 'over a limit of its tenant', share: 'its tenant had more than its part', 'bad-value': 'its input does not fit', 'no-capacity': 'no device here can run it', unauthorized: 'its token is wrong', forbidden: 'its token may not do that' };

function useCalls(outcome, target, everyMs) {
  return useLoaded((signal) => api('GET', `/v1/console/calls?${new URLSearchParams({ ...(outcome && { outcome }), ...(target && { target }), limit: 60 })}`, undefined, { signal }), [outcome, target, everyMs], everyMs);
}

function Filter({ path, target, outcome = '', children }) {
  const submit = (event) => { event.preventDefault(); const next = new FormData(event.target).get('target').trim(); go(`/${path}?${new URLSearchParams({ ...(outcome && { outcome }), ...(next && { target: next }) })}`); };
  return html`<form class="row filter" onSubmit=${submit}><label class="inline"><span>Function or workflow</span><input name="target" value=${target} /></label><button>Show</button>${target && html`<a href=${`/console/${path}`}>Show all</a>`}${children}</form>`;
}

const Hold = ({ held, set }) => html`<button type="button" aria-pressed=${String(held)} onClick=${() => set(!held)}>${held ? 'Go on' : 'Pause'}</button>`;
const CallId = ({ id }) => html`<span class="mono">${id.slice(0, 16)}</span>`;

export function Calls({ parts, query }) {
  const [held, hold] = useState(false);
  const target = query.get('target') || '', outcome = query.get('outcome') || '';
  if (parts[0]) return html`<${CallPage} key=${parts[0]} id=${parts[0]} />`;
  const { data, error, reload } = useCalls(outcome, target, held ? 0 : 2000);
  return html`<${Head} title="Calls" about="The last calls that ended, from the flight recorder. Open one to see its phases, its batches and what was weighed."><${Segments} label="Ended" value=${outcome} options=${[['', 'All'], ['in time', 'In time'], ['late', 'Late'], ['refused', 'Refused'], ['failed', 'Failed']]} onChange=${(next) => go(`/calls?${new URLSearchParams({ ...(next && { outcome: next }), ...(target && { target }) })}`)} /><${Hold} held=${held} set=${hold} /><//>
    <${Filter} path="calls" target=${target} outcome=${outcome} /><${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Calls" rows=${data?.calls ?? (error ? [] : null)} href=${(one) => to('calls', one.id)} empty="No such call among the last ones. Call a function, for example in the Playground." columns=${[
      ['call', (one) => html`<${CallId} id=${one.id} />`], ['target', (one) => (one.target ? html`<${FunctionName} name=${one.target} />` : '–')], ['tenant', (one) => html`<span class="clip">${one.tenant || '–'}</span>`], ['ended', (one) => html`<span class=${`tag ${KIND[one.what]}`}>${one.what}</span>`], ['when', (one) => ago(one.age_ms), 'nowrap'],
      ['took', (one) => ms(one.latency_ms), 'n'], ['queued', (one) => ms(one.queue_ms), 'n'], ['had', (one) => ms(one.goal_ms), 'n'], ['batch', (one) => num(one.batch), 'n'], ['slice', (one) => one.slice || '–', 'nowrap'], ['cost', (one) => (one.cost === undefined ? '–' : cost(one.cost)), 'n'], ['why', (one) => html`<span class="clip short">${one.reason || ''}</span>`]]} /></section>`;
}

export function Refusals({ query }) {
  const [held, hold] = useState(false);
  const target = query.get('target') || '';
  const { data, error, reload } = useCalls('refused', target, held ? 0 : 2000);
  const { pulse } = useLive();
  const counts = {};
  for (const one of pulse?.targets || []) if (!target || one.name === target) for (const [reason, count] of Object.entries(one.reasons)) counts[reason] = (counts[reason] || 0) + count;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0), over = !pulse || pulse.window_s >= 59 ? 'last minute' : `last ${num(Math.max(1, pulse.window_s))} s`;
  return html`<${Head} title="Refusals" about="Calls that were answered with 429 at once, instead of being late. Open one to see what was weighed and what would have let it in."><${Hold} held=${held} set=${hold} /><//>
    <${Filter} path="refusals" target=${target} /><${Oops} error=${error} retry=${reload} />
    <section class="card"><h2>By reason <span class="soft">${over}</span></h2><${Table} label="Refusals by reason" rows=${Object.entries(counts).sort((a, b) => b[1] - a[1])} empty=${`None in the ${over}.`} columns=${[['reason', ([reason]) => html`<strong>${reason}</strong> <span class="soft">${REASONS[reason] || ''}</span>`], ['calls', ([, count]) => num(count), 'n'], ['share', ([, count]) => html`<${Meter} kind="plain" part=${count / total} />`]]} /></section>
    <section class="card"><h2>The last ones</h2><${Table} label="Refused calls" rows=${data?.calls.slice(0, 50) ?? (error ? [] : null)} href=${(one) => to('calls', one.id)} empty="No call was refused lately: everything that came was admitted." columns=${[
      ['call', (one) => html`<${CallId} id=${one.id} />`], ['target', (one) => (one.target ? html`<${FunctionName} name=${one.target} />` : '–')], ['tenant', (one) => html`<span class="clip">${one.tenant || '–'}</span>`], ['why', (one) => html`<span class="clip">${REASONS[one.reason] || one.reason}</span>`], ['had', (one) => ms(one.goal_ms), 'n'], ['could be promised', (one) => ms(one.offer_ms), 'n'], ['when', (one) => ago(one.age_ms), 'nowrap']]} /></section>`;
}

// ---------------------------------------------------------------------------------------- one call

/** A bar of times: [name, milliseconds, class]; with a mark where the deadline is. */
function Times({ label, parts, goal }) {
  const box = useRef(), mark = useRef(), sum = parts.reduce((all, [, size]) => all + size, 0) || 1, total = goal ? Math.max(sum, 1.06 * goal) : sum;
  useEffect(() => {
    [...box.current.querySelectorAll('i')].forEach((one, at) => { one.style.width = `${(100 * parts[at][1]) / total}%`; });
    if (mark.current) mark.current.style.left = `${(100 * goal) / total}%`;
  });
  return html`<div class="times"><div class="phases" role="img" aria-label=${label} ref=${box}>${parts.map(([name, size, kind]) => html`<i class=${kind} title=${`${name}: ${ms(size)}`}></i>`)}${goal > 0 && goal < 50 * sum && html`<b ref=${mark} title=${`deadline: ${ms(goal)}`}></b>`}</div>
    <ul class="legend">${parts.filter(([, size]) => size > 0).map(([name, size, kind]) => html`<li><span class=${`swatch ${kind}`}></span>${name} <strong>${ms(size)}</strong></li>`)}${goal > 0 && html`<li><span class="swatch mark"></span>deadline <strong>${ms(goal)}</strong></li>`}</ul></div>`;
}

function phasesOf(told) {
  const end = told.end, unread = told.unread_ms || 0;
  let device = 0, until = 0;
  for (const [from, to] of told.steps.filter((step) => step.ended_ms !== undefined).map((step) => [step.ended_ms - step.took_ms, step.ended_ms]).sort((a, b) => a[0] - b[0])) { device += Math.max(0, to - Math.max(from, until)); until = Math.max(until, to); }
  const parts = [['unread', Math.min(unread, end.latency_ms), 'unread'], ['queued', end.queue_ms, 'queue'], ['waiting for a load', end.cold_ms, 'cold'], ['on slices', Math.min(device, end.latency_ms), 'device']];
  const rest = end.latency_ms - parts.reduce((sum, [, size]) => sum + size, 0);
  return [...parts, ['way, hand-over and waits between steps', Math.max(0, rest), 'way']].filter(([, size]) => size > 0);
}

function Why({ why }) {
  if (why === null || why === undefined) return html`<p class="soft">What else it could have been was not recorded: lamina serve --explain does.</p>`;
  if (typeof why === 'string') return html`<p>${why}</p>`;
  if (!why.chosen) return html`<pre>${JSON.stringify(why, null, 1)}</pre>`;
  return html`<p>${why.because[0].toUpperCase()}${why.because.slice(1)}. ${why.waiting} ${why.waiting === 1 ? 'job' : 'jobs'} waited, the first for ${ms(why.waited_ms)}; ${why.budget_ms === null ? 'no deadline' : `${ms(why.budget_ms)} were left`}.</p>
    <${Table} label="Configurations that were compared" rows=${[{ ...why.chosen, why_not: 'chosen' }, ...why.alternatives]} chosen=${(one) => one.why_not === 'chosen'} columns=${[['batch', (one) => one.batch, 'n'], ['units', (one) => one.units, 'n'], ['device', (one) => one.device], ['time', (one) => ms(one.time_ms), 'n'], ['cost of a job', (one) => cost(one.cost), 'n'], ['with the rest', (one) => (one.total === null ? '–' : cost(one.total)), 'n'], ['why not', (one) => (one.why_not === 'chosen' ? html`<span class="tag good">chosen</span>` : one.why_not)]]} />`;
}

function CallPage({ id }) {
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/calls/${encodeURIComponent(id)}`, undefined, { signal }), [id]);
  if (!data) return html`<${Head} title=${`Call ${id.slice(0, 24)}`} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Looking through the flight recorder.</p>`}`;
  const end = data.end, ended = end ? end.what.split(':')[0] : 'under way';
  return html`<${Head} title=${html`Call <span class="mono">${id.slice(0, 24)}</span>`}><span class=${`tag ${KIND[ended] || ''}`}>${end ? end.what.slice(0, 60) : 'under way'}</span><button onClick=${reload}>Look again</button><//>
    <section class="card"><${Facts} of=${[['target', html`<${FunctionName} name=${data.target} />`], data.tenant && ['tenant', data.tenant], ['had', data.goal_ms ? ms(data.goal_ms) : 'no deadline'], end?.latency_ms !== undefined && ['took', ms(end.latency_ms)], end?.cost !== undefined && ['cost', cost(end.cost)], end?.retries > 0 && ['retries', end.retries], ['arrived', ago(data.age_ms)]]} />
      ${end?.latency_ms !== undefined && html`<${Times} label="Phases of the call" parts=${phasesOf(data)} goal=${data.goal_ms} />`}</section>
    ${ended === 'refused' && html`<${Refusal} told=${data} />`}
    ${ended === 'failed' && html`<section class="card"><h2>Why it failed</h2><p class="break">${end.what.slice(8)}${end.step ? `, in step ${end.step}` : ''}</p></section>`}
    ${data.waiting?.length > 0 && html`<section class="card"><h2>It waits</h2><${Table} label="Waiting steps" rows=${data.waiting} columns=${[['step', (one) => one.step], ['function', (one) => one.function], ['queue', (one) => `${num(one.queue)} jobs`, 'n'], ['delayed by', (one) => one.delay || '–']]} /></section>`}
    ${ended !== 'refused' && html`<section class="card"><h2>Steps</h2><${Table} label="Steps of the call" rows=${data.steps.slice(0, 200)} empty="No step of it ran." columns=${[['step', (one) => one.step], ['function', (one) => html`<${FunctionName} name=${one.function} />`], ['decided after', (one) => ms(one.decided_ms - data.arrived_ms), 'n'], ['batch', (one) => `${one.batch} ${one.batch === 1 ? 'job' : 'jobs'}`, 'n'], ['slice', (one) => one.slice, 'nowrap'], ['predicted', (one) => ms(one.predicted_ms), 'n'], ['took', (one) => ms(one.took_ms), 'n'], ['delayed by', (one) => one.delay || '–'], ['error', (one) => one.error || '']]} />
      ${data.steps.slice(0, 50).map((step) => html`<details><summary>${step.step}: its batch, and what else it could have been</summary>
        ${step.mates?.length > 0 ? html`<p>It shared its batch with ${step.mates.map((mate, at) => html`${at > 0 && ', '}<a class="mono" href=${to('calls', mate)}>${mate.slice(0, 16)}</a>`)}.</p>` : html`<p class="soft">It was alone in its batch.</p>`}${step.behind_batch && html`<p>The batch was booked behind batch ${step.behind_batch}.</p>`}<${Why} why=${step.why} /></details>`)}${data.steps.length > 50 && html`<p class="soft">Of ${num(data.steps.length)} batches the first are shown.</p>`}</section>`}`;
}

const REMEDY = { time: 'more time', units: 'units', device: 'one more GPU', limit: 'limits', cost: 'cost', wait: 'asking again', input: 'input', host: 'the machine' };

function Refusal({ told }) {
  const reason = told.end.what.split(': ')[1];
  const more = useAction((kind) => api('GET', '/v1/console/plan').then((now) => api('POST', '/v1/console/plan', { rates: Object.fromEntries(now.targets.filter((one) => one.known).map((one) => [one.name, one.rate])), devices: { [kind]: (now.devices[kind] || 0) + 1 }, seconds: 10 })));
  const tag = (one) => (one.kind === 'device' ? `one more ${one.device}` : REMEDY[one.kind]);
  return html`<section class="card"><h2>Why it was refused: ${REASONS[reason] || reason}</h2>
    ${told.explanation.map((text) => html`<p class="say break">${text}</p>`)}
    ${told.like && html`<p><a href=${to('calls', told.like)}>What was weighed for call ${told.like}</a></p>`}
    ${told.terms.length > 0 && html`<h3>What was weighed</h3><${Times} label="Time it would have taken, and its deadline" goal=${told.goal_ms} parts=${told.terms.map((one) => [one.name, one.ms, { unread: 'unread', expected: 'device', margin: 'queue', reserve: 'cold' }[one.name]])} />
      <${Table} label="What was weighed" rows=${[...told.terms, { name: 'in all', ms: told.terms.reduce((sum, one) => sum + one.ms, 0), meaning: told.goal_ms ? `it had ${ms(told.goal_ms)}` : '' }]} columns=${[['term', (one) => one.name], ['time', (one) => ms(one.ms), 'n'], ['what it is', (one) => html`<span class="soft">${one.meaning}</span>`]]} />`}
    <h3>What would have let it in</h3>
    ${told.remedies.map((one) => html`<div class="remedy"><span class=${`tag ${one.helps === false ? 'bad' : 'good'}`}>${tag(one)}</span><span>${one.text}</span>
      ${one.kind === 'device' && one.helps && html`<button disabled=${more.busy} onClick=${() => more.run(one.device)}>${more.busy ? 'Simulating' : `Simulate one more ${one.device}`}</button>`}
      ${one.kind === 'limit' && html`<a href="/console/access/tenants">Limits</a>`}</div>`)}
    ${!told.remedies.length && html`<p class="soft">Nothing is known that would have.</p>`}
    <${Oops} error=${more.error} />${more.done && html`<${Outcome} result=${more.done} target=${told.target} />`}</section>`;
}
