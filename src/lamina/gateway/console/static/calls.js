// Calls and refusals: the last ones, and all that was decided about one of them.
import { html, useState } from './vendor/preact.js';
import { useLive } from './feed.js';
import { Facts, FunctionName, Head, Meter, Oops, Segments, Table, ago, api, cost, go, ms, num, pct, to, useAction, useLoaded } from './lib.js';
import { Outcome } from './plan.js';

const KIND = { 'in time': 'good', late: 'warn', refused: 'bad', failed: 'bad' };
const REASONS = { deadline: 'would have been late', cost: 'would have cost more than its limit', 'queue-full': 'the queue was full', quota: 'a limit of the tenant', share: 'others of the device had to wait', 'bad-value': 'the input does not fit' };

function useCalls(outcome, target) {
  return useLoaded((signal) => api('GET', `/v1/console/calls?${new URLSearchParams({ ...(outcome && { outcome }), ...(target && { target }), limit: 60 })}`, undefined, { signal }), [outcome, target], 2000);
}

function Filter({ path, target, children }) {
  return html`<form class="row" onSubmit=${(event) => { event.preventDefault(); const next = new FormData(event.target).get('target'); go(`/${path}${next ? `?target=${encodeURIComponent(next)}` : ''}`); }}><label class="inline"><span>Function or workflow</span><input name="target" value=${target} /></label><button>Show</button>${children}</form>`;
}

export function Calls({ parts, query }) {
  const [outcome, setOutcome] = useState('');
  const target = query.get('target') || '';
  if (parts[0]) return html`<${CallPage} key=${parts[0]} id=${parts[0]} />`;
  const { data, error, reload } = useCalls(outcome, target);
  return html`<${Head} title="Calls" about="The last calls that ended, from the flight recorder. Open one to see its phases, its batches and what was weighed."><${Segments} label="Ended" value=${outcome} options=${[['', 'All'], ['in time', 'In time'], ['late', 'Late'], ['refused', 'Refused'], ['failed', 'Failed']]} onChange=${setOutcome} /><//>
    <${Filter} path="calls" target=${target} /><p></p><${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Calls" rows=${data?.calls ?? (error ? [] : null)} href=${(one) => to('calls', one.id)} empty="No such call among the last ones. Call a function, for example in the Playground." columns=${[
      ['call', (one) => html`<span class="mono">${one.id.slice(0, 16)}</span>`], ['target', (one) => (one.target ? html`<${FunctionName} name=${one.target} />` : '–')], ['ended', (one) => html`<span class=${`tag ${KIND[one.what]}`}>${one.what}</span>`], ['when', (one) => ago(one.age_ms), 'nowrap'],
      ['took', (one) => ms(one.latency_ms), 'n'], ['of that queued', (one) => ms(one.queue_ms), 'n'], ['goal', (one) => ms(one.goal_ms), 'n'], ['batch', (one) => num(one.batch), 'n'], ['slice', (one) => one.slice || '–'], ['cost', (one) => (one.cost === undefined ? '–' : cost(one.cost)), 'n'], ['why', (one) => one.reason || '']]} /></section>`;
}

export function Refusals({ query }) {
  const target = query.get('target') || '';
  const { data, error, reload } = useCalls('refused', target);
  const { pulse } = useLive();
  const counts = {};
  for (const one of pulse?.targets || []) if (!target || one.name === target) for (const [reason, count] of Object.entries(one.reasons)) counts[reason] = (counts[reason] || 0) + count;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  return html`<${Head} title="Refusals" about="Calls that were answered with 429 at once, instead of being late. Open one to see what was weighed and what would have let it in." />
    <${Filter} path="refusals" target=${target} /><p></p><${Oops} error=${error} retry=${reload} />
    <section class="card"><h2>By reason <span class="soft">last minute</span></h2><${Table} label="Refusals by reason" rows=${Object.entries(counts).sort((a, b) => b[1] - a[1])} empty="None in the last minute." columns=${[['reason', ([reason]) => html`<strong>${reason}</strong> <span class="soft">${REASONS[reason] || ''}</span>`], ['calls', ([, count]) => num(count), 'n'], ['share', ([, count]) => html`<${Meter} part=${count / total} />`]]} /></section>
    <section class="card"><h2>The last ones</h2><${Table} label="Refused calls" rows=${data?.calls.slice(0, 50) ?? (error ? [] : null)} href=${(one) => to('calls', one.id)} empty="No call was refused lately: everything that came was admitted." columns=${[
      ['call', (one) => html`<span class="mono">${one.id.slice(0, 16)}</span>`], ['target', (one) => (one.target ? html`<${FunctionName} name=${one.target} />` : '–')], ['why', (one) => REASONS[one.reason] || one.reason, 'nowrap'], ['goal', (one) => ms(one.goal_ms), 'n'], ['could be had in', (one) => ms(one.offer_ms), 'n'], ['when', (one) => ago(one.age_ms), 'nowrap']]} /></section>`;
}

function Phases({ told }) {
  const end = told.end || {};
  const device = told.steps.reduce((sum, step) => sum + (step.took_ms || 0), 0);
  const parts = [['queued', end.queue_ms || 0, 'queue'], ['waiting for a load', end.cold_ms || 0, 'cold'], ['on the slice', Math.min(device, end.latency_ms || 0), 'device']];
  parts.push(['way and hand-over', Math.max(0, (end.latency_ms || 0) - parts.reduce((sum, [, size]) => sum + size, 0)), 'way']);
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  const widths = (box) => box && [...box.children].forEach((one, at) => { one.style.width = `${(100 * parts[at][1]) / total}%`; });
  return html`<div class="phases" role="img" aria-label="Phases of the call" ref=${widths}>${parts.map(([name, , kind]) => html`<i class=${kind} title=${name}></i>`)}</div>
    <${Facts} of=${parts.map(([name, size]) => [name, ms(size)])} />`;
}

const Why = ({ why }) => (why === null || why === undefined ? html`<span class="soft">Not recorded: serve --explain keeps what was weighed.</span>` : html`<pre>${typeof why === 'string' ? why : JSON.stringify(why, null, 1)}</pre>`);

function CallPage({ id }) {
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/calls/${encodeURIComponent(id)}`, undefined, { signal }), [id]);
  if (!data) return html`<${Head} title=${`Call ${id.slice(0, 24)}`} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Looking through the flight recorder.</p>`}`;
  const end = data.end, ended = end ? end.what.split(':')[0] : 'under way';
  return html`<${Head} title=${html`Call <span class="mono">${id.slice(0, 24)}</span>`}><span class=${`tag ${KIND[ended] || ''}`}>${end ? end.what : 'under way'}</span><button onClick=${reload}>Look again</button><//>
    <section class="card"><${Facts} of=${[['target', html`<${FunctionName} name=${data.target} />`], data.tenant && ['tenant', data.tenant], ['goal', ms(data.goal_ms)], end?.latency_ms !== undefined && ['took', ms(end.latency_ms)], end?.cost !== undefined && ['cost', cost(end.cost)], end?.retries > 0 && ['retries', end.retries], ['arrived', ago(data.age_ms)]]} />
      ${end?.latency_ms !== undefined && html`<p></p><${Phases} told=${data} />`}</section>
    ${ended === 'refused' && html`<${Refusal} told=${data} />`}
    ${data.waiting?.length > 0 && html`<section class="card"><h2>It waits</h2><${Table} label="Waiting steps" rows=${data.waiting} columns=${[['step', (one) => one.step], ['function', (one) => one.function], ['queue', (one) => one.queue, 'n'], ['delayed by', (one) => one.delay || '–']]} /></section>`}
    <section class="card"><h2>Steps</h2><${Table} label="Steps of the call" rows=${data.steps} empty="No step of it ran." columns=${[['step', (one) => one.step], ['function', (one) => one.function], ['decided after', (one) => ms(one.decided_ms - data.arrived_ms), 'n'], ['batch', (one) => one.batch, 'n'], ['slice', (one) => one.slice], ['predicted', (one) => ms(one.predicted_ms), 'n'], ['took', (one) => ms(one.took_ms), 'n'], ['booked behind', (one) => one.behind_batch || '–', 'n'], ['delayed by', (one) => one.delay || '–'], ['error', (one) => one.error || '']]} />
      ${data.steps.map((step) => html`<details><summary>${step.step}: what was weighed, and its batch</summary><${Why} why=${step.why} />
        ${step.mates?.length > 0 ? html`<p>Shared its batch with ${step.mates.map((mate, at) => html`${at > 0 && ', '}<a class="mono" href=${to('calls', mate)}>${mate.slice(0, 12)}</a>`)}</p>` : html`<p class="soft">It was alone in its batch.</p>`}</details>`)}</section>`;
}

function Refusal({ told }) {
  const reason = told.end.what.split(': ')[1];
  const more = useAction((kind) => api('GET', '/v1/console/plan').then((now) => api('POST', '/v1/console/plan', { rates: Object.fromEntries(now.targets.filter((one) => one.known).map((one) => [one.name, one.rate])), devices: { [kind]: (now.devices[kind] || 0) + 1 }, seconds: 10 })));
  return html`<section class="card"><h2>Why it was refused: ${REASONS[reason] || reason}</h2>
    <${Facts} of=${[['its goal', ms(told.goal_ms)], ['could be promised', ms(told.end.offer_ms)]]} />
    <h3>What was weighed</h3><${Why} why=${told.end.why} />
    <h3>What would have let it in</h3>
    ${told.remedies.map((one) => html`<div class="remedy"><span class=${`tag ${one.helps === false ? 'bad' : 'good'}`}>${{ time: 'more time', units: 'more units', device: 'one more GPU', limit: 'limits', cost: 'cost', wait: 'queue', input: 'input' }[one.kind]}</span><span>${one.text}</span>
      ${one.kind === 'device' && html`<button disabled=${more.busy} onClick=${() => more.run(one.device)}>${more.busy ? 'Simulating' : `Simulate one more ${one.device}`}</button>`}
      ${one.kind === 'limit' && html`<a href="/console/access/tenants">Limits</a>`}</div>`)}
    ${!told.remedies.length && html`<p class="soft">Nothing is known that would have: the reason says it all.</p>`}
    <${Oops} error=${more.error} />${more.done && html`<${Outcome} result=${more.done} target=${told.target} />`}</section>`;
}
