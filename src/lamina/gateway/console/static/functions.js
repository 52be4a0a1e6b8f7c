// Functions: what was offered, how it ended, what waits, and the profile beside what was observed.
import { html, useState } from './vendor/preact.js';
import { useLive } from './feed.js';
import { Chart, Empty, Facts, FunctionName, Head, Meter, Oops, Options, Table, api, cost, go, ms, num, pct, to, mib, useLoaded, Bar } from './lib.js';

const PAGE = 50;
const offered = (one) => one.met + one.late + one.failed + one.refused;

export function Functions({ parts, query }) {
  if (parts[0]) return html`<${FunctionPage} key=${parts[0]} name=${parts[0]} />`;
  const search = query.get('search') || '', sort = query.get('sort') || 'calls', offset = Number(query.get('offset')) || 0;
  const turn = (changes) => { const next = new URLSearchParams({ search, sort, offset, ...changes }); go(`/functions?${next}`, true); };
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/functions?${new URLSearchParams({ search, sort, offset, limit: PAGE })}`, undefined, { signal }), [search, sort, offset], 2000);
  return html`<${Head} title="Functions" about="Every function and workflow that can be called. Counts are since the server started; shares of device time of the last ten seconds.">
      <label class="inline"><span>Search</span><input type="search" value=${search} onInput=${(event) => turn({ search: event.target.value, offset: 0 })} /></label>
      <label class="inline"><span>Order</span><select value=${sort} onChange=${(event) => turn({ sort: event.target.value, offset: 0 })}><${Options} value=${sort} of=${['calls', 'queue', 'late', 'refused', 'name']} /></select></label><//>
    <${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Functions and workflows" rows=${data?.functions ?? (error ? [] : null)} href=${(one) => to('functions', one.name)}
      empty=${search ? `Nothing is called ${search}.` : 'Nothing is deployed. Deploy an app under Apps, or start the server with one.'} columns=${[
        ['name', (one) => html`<span class="clip">${one.name}</span>`], ['kind', (one) => one.kind], ['calls', (one) => num(offered(one)), 'n'], ['in time', (one) => (offered(one) ? html`<${Meter} part=${one.met / offered(one)} goal=${one.goal} />` : '–')],
        ['late', (one) => num(one.late), 'n'], ['refused', (one) => num(one.refused), 'n'], ['failed', (one) => num(one.failed), 'n'], ['queue', (one) => num(one.queue), 'n'], ['jobs/s', (one) => num(one.jobs_per_s), 'n'], ['held', (one) => pct(one.held), 'n'],
        ['instances', (one) => (one.instances ? Object.entries(one.instances).map(([phase, count]) => `${count} ${phase}`).join(', ') || 'none' : '–')], ['SLO', (one) => ms(one.slo_ms), 'n'], ['cost', (one) => cost(one.cost), 'n']]} />
      ${data && data.total > PAGE && html`<p class="row"><button disabled=${!offset} onClick=${() => turn({ offset: Math.max(0, offset - PAGE) })}>Before</button><span class="soft">${num(offset + 1)} to ${num(Math.min(data.total, offset + PAGE))} of ${num(data.total)}</span><button disabled=${offset + PAGE >= data.total} onClick=${() => turn({ offset: offset + PAGE })}>After</button></p>`}</section>`;
}

function FunctionPage({ name }) {
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/functions/${encodeURIComponent(name)}`, undefined, { signal }), [name], 2000);
  const { pulse } = useLive();
  const [seen] = useState(() => []);
  const now = pulse?.targets.find((one) => one.name === name);
  if (pulse && now && (!seen.length || seen[seen.length - 1].wall < pulse.wall)) {
    const last = seen[seen.length - 1];
    seen.push({ wall: pulse.wall, total: now.total, rate: last ? now.total.map((count, at) => Math.max(0, (count - last.total[at]) / (pulse.wall - last.wall))) : [null, null, null, null] });
    if (seen.length > 300) seen.shift();
  }
  if (!data) return html`<${Head} title=${name} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const sizes = Object.entries(data.batch_sizes || {}), batches = sizes.reduce((sum, [, count]) => sum + count, 0);
  const tenants = Object.entries(data.queue_by_tenant || {});
  return html`<${Head} title=${data.name} about=${data.doc}><a class="button" href=${to('playground', data.name)}>Call it</a><a class="button" href=${`/console/refusals?target=${encodeURIComponent(name)}`}>Refusals</a><a class="button" href=${`/console/calls?target=${encodeURIComponent(name)}`}>Calls</a><//>
    <${Oops} error=${error} retry=${reload} />
    <div class="grid"><section class="card"><h2>How calls ended <span class="soft">since the start</span></h2>
      <${Bar} label="Calls by how they ended" total=${offered(data)} parts=${[['in time', data.met, 'f1'], ['late', data.late, 'f2'], ['refused', data.refused, 'f4'], ['failed', data.failed, 'f3']]} />
      <${Table} label="Calls by how they ended" rows=${[['in time', data.met, 1], ['late', data.late, 2], ['refused', data.refused, 4], ['failed', data.failed, 3]]} columns=${[['ended', ([text, , at]) => html`<span class=${`swatch f${at}`}></span>${text}`], ['calls', ([, count]) => num(count), 'n'], ['share', ([, count]) => pct(count / Math.max(1, offered(data))), 'n']]} />
      ${Object.keys(data.reasons).length > 0 && html`<p class="soft">Refused for: ${Object.entries(data.reasons).map(([reason, count]) => `${reason} ${num(count)}`).join(', ')}</p>`}
      <${Facts} of=${[['SLO', ms(data.slo_ms)], ['for', pct(data.goal, 2)], ['p50', ms(data.recent.p50_ms)], ['p99', ms(data.recent.p99_ms)], ['cost', cost(data.cost)]]} /></section>
    <section class="card"><h2>Calls a second</h2>${seen.length > 1 ? html`<${Chart} label=${`Calls of ${name} a second`} unit="/s" series=${[['in time', '--c1'], ['late', '--c2'], ['refused', '--c4']]} data=${[seen.map((one) => one.wall), ...[0, 1, 3].map((at) => seen.map((one) => one.rate[at]))]} />` : html`<${Empty}>No call came while this page was open.<//>`}</section>
    ${data.kind === 'workflow' ? html`<section class="card"><h2>Steps</h2><ul class="legend">${data.steps.map((step) => html`<li><${FunctionName} name=${step} /></li>`)}</ul><p><a href=${to('runs', 'new', name)}>Start a run</a></p></section>` : html`
    <section class="card"><h2>Where it stands</h2>
      <${Facts} of=${[['queue', num(data.queue)], ['largest batch', data.max_batch], ['wants', data.share ? `${pct(data.share, 0)} of a GPU` : `${data.cores} ${data.cores === 1 ? 'core' : 'cores'}`], ['objective', data.objective], ['instances', `${data.scale.min} to ${data.scale.max}`], ['memory', mib(data.memory_mib)], data.home && ['home', data.lend ? 'its own, lent while idle' : 'its own'], ['held', pct(data.held)], ['used', pct(data.used)]]} />
      ${data.delay && html`<p class="warn-text">Its queue waits: ${data.delay}</p>`}
      <${Table} label="Instances" rows=${data.instances} empty="No instance is loaded; the first call loads one." columns=${[['instance', (one) => one.id], ['device', (one) => one.device], ['phase', (one) => one.phase], ['batches now', (one) => one.batches, 'n']]} />
      <h3>Queue by tenant</h3><${Table} label="Queue by tenant" rows=${tenants} empty="Nothing waits." columns=${[['tenant', ([tenant]) => tenant || 'none'], ['jobs', ([, count]) => num(count), 'n']]} /></section>
    <section class="card"><h2>Batch sizes</h2><${Table} label="Batch sizes" rows=${sizes} empty="No batch has run." columns=${[['jobs in a batch', ([size]) => size], ['batches', ([, count]) => num(count), 'n'], ['share', ([, count]) => html`<${Meter} part=${count / batches} />`]]} /></section>
    <section class="card"><h2>Profile against observed</h2><div class="tall" tabindex="0" role="region" aria-label="Profile against observed, all points"><${Table} label="Profile against observed" rows=${data.profile} empty="Nothing is known of it yet: call it a few times, or measure it with lamina profile." columns=${[['device', (one) => one.device], ['batch', (one) => one.batch, 'n'], ['units', (one) => one.units, 'n'], ['profiled', (one) => ms(one.profiled_ms), 'n'], ['observed', (one) => ms(one.observed_ms), 'n'], ['planned with', (one) => ms(one.planned_ms), 'n'], ['', (one) => (one.stale ? html`<span class="tag warn">stale</span>` : '')]]} /></div></section>`}</div>`;
}
