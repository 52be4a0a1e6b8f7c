// Functions: what was offered, how it ended, what waits, and the profile beside what was observed.
import { html, useEffect, useRef } from './vendor/preact.js';
import { useLive } from './feed.js';
import { Bar, Chart, Empty, Facts, FunctionName, Head, Meter, Oops, Options, Pager, Table, api, colour, cost, go, mib, ms, num, pct, to, useLoaded, useScheme } from './lib.js';

const PAGE = 50;
const offered = (one) => one.met + one.late + one.failed + one.refused;
const phases = (found) => Object.entries(found).map(([phase, count]) => `${count} ${phase}`).join(', ') || 'none';

export function Functions({ parts, query }) {
  if (parts[0]) return html`<${FunctionPage} key=${parts[0]} name=${parts[0]} />`;
  const search = query.get('search') || '', sort = query.get('sort') || 'calls', offset = Number(query.get('offset')) || 0;
  const turn = (changes) => { const next = new URLSearchParams({ search, sort, offset, ...changes }); go(`/functions?${next}`, true); };
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/functions?${new URLSearchParams({ search, sort, offset, limit: PAGE })}`, undefined, { signal }), [search, sort, offset], 2000);
  return html`<${Head} title="Functions" about="Every function and workflow that can be called. Calls and cost are since the server started, jobs and leased units of the last ten seconds, where 100 % is a whole device. Cost is the time of the leased units at the price of their device; at the default price it is in seconds of a whole device.">
      <label class="inline"><span>Search</span><input type="search" value=${search} onInput=${(event) => turn({ search: event.target.value, offset: 0 })} /></label>
      <label class="inline"><span>Order</span><select value=${sort} onChange=${(event) => turn({ sort: event.target.value, offset: 0 })}><${Options} value=${sort} of=${[['calls', 'most calls'], ['queue', 'longest queue'], ['late', 'most late'], ['refused', 'most refused'], ['name', 'name']]} /></select></label><//>
    <${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Functions and workflows" rows=${data?.functions ?? (error ? [] : null)} href=${(one) => to('functions', one.name)}
      empty=${search ? `Nothing has ${search.slice(0, 80)} in its name.` : 'Nothing is deployed. Deploy an app under Apps, or start the server with one.'} columns=${[
        ['name', (one) => html`<span class="clip" title=${one.name.length > 30 ? one.name.slice(0, 300) : undefined}>${one.name.slice(0, 120)}</span>`], ['kind', (one) => html`<span class="soft">${one.kind}</span>`], ['calls', (one) => num(offered(one)), 'n'], ['in time', (one) => (offered(one) ? html`<${Meter} part=${one.met / offered(one)} goal=${one.goal} />` : '–')],
        ['late', (one) => num(one.late), 'n'], ['refused', (one) => num(one.refused), 'n'], ['failed', (one) => num(one.failed), 'n'], ['queue', (one) => num(one.queue), 'n'], ['jobs/s', (one) => num(one.jobs_per_s), 'n'], ['leased', (one) => pct(one.held), 'n'],
        ['instances', (one) => (one.instances ? phases(one.instances) : '–'), 'nowrap'], ['SLO', (one) => ms(one.slo_ms), 'n'], ['cost', (one) => cost(one.cost), 'n']]} />
      <${Pager} from=${offset} size=${PAGE} total=${data?.total ?? 0} onChange=${(from) => turn({ offset: from })} /></section>`;
}

/** Calls of one target a second, from what the feed has told since the console was opened. */
function rates(history, name) {
  const found = { wall: [], rate: [[], [], [], []] };
  let last = null;
  for (const one of history) {
    const total = one.totals.get(name), seconds = last && total ? one.wall - last.wall : 0;
    found.wall.push(one.wall);
    found.rate.forEach((line, at) => line.push(seconds > 0.2 && seconds < 10 ? Math.max(0, (total[at] - last.total[at]) / seconds) : null));
    last = total ? { total, wall: one.wall } : null;
  }
  return found;
}

function FunctionPage({ name }) {
  const { data, error, reload } = useLoaded((signal) => api('GET', `/v1/console/functions/${encodeURIComponent(name)}`, undefined, { signal }), [name], 2000);
  const { history } = useLive();
  if (!data) return html`<${Head} title=${name} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const seen = rates(history.slice(-300), name);
  const sizes = Object.entries(data.batch_sizes || {}), batches = sizes.reduce((sum, [, count]) => sum + count, 0);
  const tenants = Object.entries(data.queue_by_tenant || {});
  const ended = [['in time', data.met, 1], ['late', data.late, 2], ['refused', data.refused, 4], ['failed', data.failed, 3]];
  return html`<${Head} title=${data.name} about=${data.doc}><a class="button" href=${to('playground', data.name)}>Call it</a><a class="button" href=${`/console/calls?target=${encodeURIComponent(name)}`}>Calls</a><a class="button" href=${`/console/refusals?target=${encodeURIComponent(name)}`}>Refusals</a><//>
    <${Oops} error=${error} retry=${reload} />
    <div class="grid"><section class="card"><h2>How calls ended <span class="soft">since the server started</span></h2>
      <${Bar} label="Calls by how they ended" total=${offered(data)} parts=${ended.map(([text, count, at]) => [text, count, `f${at}`])} />
      <${Table} label="Calls by how they ended" rows=${ended} columns=${[['ended', ([text, , at]) => html`<span class=${`swatch f${at}`}></span>${text}`], ['calls', ([, count]) => num(count), 'n'], ['share', ([, count]) => pct(count / Math.max(1, offered(data))), 'n']]} />
      ${Object.keys(data.reasons).length > 0 && html`<p class="soft">Refused for: ${Object.entries(data.reasons).map(([reason, count]) => `${reason} ${num(count)}`).join(', ')}</p>`}
      <${Facts} of=${[['SLO', data.slo_ms ? `${ms(data.slo_ms)} for ${pct(data.goal, 2)} of calls` : 'none'], ['p50, last minute', ms(data.recent.p50_ms)], ['p99, last minute', ms(data.recent.p99_ms)], ['cost', cost(data.cost)]]} /></section>
    <section class="card"><h2>Calls a second</h2>${seen.rate[0].some((one) => one !== null) ? html`<${Chart} label=${`Calls of ${name} a second`} unit="/s" series=${[['in time', '--c1'], ['late', '--c2'], ['refused', '--c4'], ['failed', '--c3']]} data=${[seen.wall, ...[0, 1, 3, 2].map((at) => seen.rate[at])]} />` : html`<${Empty}>No call came since the console was opened. Call it from the Playground, or wait for clients.<//>`}</section>
    ${data.kind === 'workflow' ? html`<section class="card"><h2>Steps</h2><ul class="legend">${data.steps.map((step) => html`<li><${FunctionName} name=${step} /></li>`)}</ul><p><a href=${to('runs', 'new', name)}>Start a run</a></p></section>` : html`
    <section class="card"><h2>Where it stands</h2>
      <${Facts} of=${[['waiting', `${num(data.queue)} jobs`], ['largest batch', `${data.max_batch} jobs`], ['slice by default', data.share ? `${pct(data.share, 0)} of a GPU` : `${data.cores} ${data.cores === 1 ? 'core' : 'cores'}`], ['objective', data.objective], ['instances', `${data.scale.min} to ${data.scale.max}`], data.memory_mib > 0 && ['memory', `${mib(data.memory_mib)} each`], data.home && ['home', data.lend ? 'units of its own, lent while idle' : 'units of its own'], ['leased, last 10 s', pct(data.held)], ['computing', pct(data.used)]]} />
      ${data.delay && html`<p class="warn-text">Its queue waits: ${data.delay}</p>`}
      <${Table} label="Instances" rows=${data.instances} empty="No instance is loaded; the first call loads one." columns=${[['instance', (one) => one.id], ['device', (one) => one.device], ['phase', (one) => one.phase], ['batches now', (one) => one.batches, 'n']]} />
      <h3>Queue by tenant</h3><${Table} label="Queue by tenant" rows=${tenants} empty="Nothing waits." columns=${[['tenant', ([tenant]) => tenant || 'no tenant'], ['jobs', ([, count]) => num(count), 'n'], ['share', ([, count]) => html`<${Meter} kind="plain" part=${count / Math.max(1, tenants.reduce((sum, [, one]) => sum + one, 0))} />`]]} /></section>
    <section class="card"><h2>Batch sizes <span class="soft">since the server started</span></h2><${Table} label="Batch sizes" rows=${sizes} empty="No batch has run." columns=${[['jobs in a batch', ([size]) => size.replace('<= ', 'up to ')], ['batches', ([, count]) => num(count), 'n'], ['share', ([, count]) => html`<${Meter} kind="plain" part=${count / batches} />`]]} /></section>`}</div>
    ${data.kind !== 'workflow' && html`<${Profile} data=${data} />`}`;
}

// ---------------------------------------------------------------------------- profile and observed

const SERIES = 6;

/** Lines are the profile, dots what was observed; one colour for each width of slice. */
function drawTimes(canvas, groups, height) {
  const ratio = Math.min(2, window.devicePixelRatio || 1), wide = canvas.clientWidth || 400, left = 74, bottom = 34, top = 10, right = 12;
  canvas.width = Math.round(wide * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = canvas.getContext('2d');
  paint.scale(ratio, ratio);
  const all = groups.flatMap((group) => [...group.line, ...group.dots]).filter(([, time]) => time > 0);
  if (!all.length) return;
  const logs = all.map(([batch, time]) => [Math.log2(batch), Math.log10(time)]), widest = Math.max(1, ...logs.map(([x]) => x));
  const low = Math.floor(Math.min(...logs.map(([, y]) => y)) * 2) / 2, high = Math.max(low + 0.5, Math.ceil(Math.max(...logs.map(([, y]) => y)) * 2) / 2);
  const x = (batch) => left + ((wide - left - right) * Math.log2(batch)) / widest, y = (time) => top + (height - top - bottom) * (1 - (Math.log10(time) - low) / (high - low));
  paint.font = '12px system-ui';
  paint.textAlign = 'right';
  for (let mark = low; mark <= high + 0.01; mark += 0.5) {
    paint.fillStyle = colour('--grid');
    paint.fillRect(left, Math.round(y(10 ** mark)), wide - left - right, 1);
    paint.fillStyle = colour('--soft');
    paint.fillText(ms(Number((10 ** mark).toPrecision(1))), left - 8, y(Number((10 ** mark).toPrecision(1))) + 4);
  }
  paint.textAlign = 'center';
  for (let mark = 0; mark <= widest; mark += 1) paint.fillText(String(2 ** mark), x(2 ** mark), height - 18);
  paint.fillText('jobs in a batch', left + (wide - left - right) / 2, height - 3);
  for (const group of groups) {
    paint.strokeStyle = paint.fillStyle = colour(`--c${group.colour}`);
    paint.lineWidth = 1.6;
    paint.beginPath();
    group.line.forEach(([batch, time], at) => paint[at ? 'lineTo' : 'moveTo'](x(batch), y(time)));
    paint.stroke();
    for (const [batch, time, part] of group.dots) { paint.beginPath(); paint.arc(x(batch), y(time), 3 + 4 * Math.sqrt(part), 0, 7); paint.fill(); }
  }
}

function Profile({ data }) {
  const canvas = useRef(), scheme = useScheme(), most = Math.max(1, ...data.observed.map((one) => one.batches));
  const weight = new Map();
  for (const one of data.observed) weight.set(one.units, (weight.get(one.units) || 0) + one.batches);
  for (const one of data.profile) if (!weight.has(one.units)) weight.set(one.units, 0);
  const shown = [...weight].sort((a, b) => b[1] - a[1]).slice(0, SERIES).map(([units]) => units).sort((a, b) => a - b);
  const kind = data.observed[0]?.device ?? data.profile[0]?.device;
  const groups = shown.map((units, at) => ({ units, colour: [0, 2, 1, 3, 5, 6][at], line: [...new Map([...data.profile, ...data.observed].filter((one) => one.units === units && one.device === kind && one.profiled_ms).map((one) => [one.batch, one.profiled_ms]))].sort((a, b) => a[0] - b[0]), dots: data.observed.filter((one) => one.units === units && one.device === kind).map((one) => [one.batch, one.p50_ms, one.batches / most]) }));
  useEffect(() => {
    if (!canvas.current) return undefined;
    const turn = () => drawTimes(canvas.current, groups, 260);
    turn();
    const watch = new ResizeObserver(turn);
    watch.observe(canvas.current);
    return () => watch.disconnect();
  }, [scheme, data]);
  const stale = data.profile.some((one) => one.stale);
  return html`<section class="card"><h2>Profile against observed <span class="soft">time of a batch on its slice${kind ? `, ${kind}` : ''}</span></h2>
    ${stale && html`<div class="note warn"><p>What was observed lies outside of the profile. Measure it again: <code>lamina profile ${data.name}</code></p></div>`}
    ${!data.profile.length && !data.observed.length ? html`<${Empty}>Nothing is known of it yet: call it a few times, or measure it with lamina profile.<//>` : html`<div class="split later"><div>
      <canvas class="chart tall-chart" ref=${canvas} role="img" aria-label="Time of a batch by its size: profile as lines, observed as dots; the table beside it has the same"></canvas>
      <ul class="legend">${groups.map((group) => html`<li><span class=${`swatch f${group.colour}`}></span>${group.units} ${group.units === 1 ? 'unit' : 'units'}</li>`)}<li class="soft">lines: profile; dots: median of the last batches, larger for more of them</li></ul></div>
      <div class="tall" tabindex="0" role="region" aria-label="Profile against observed, all points">
      <${Table} label="Observed batches" rows=${data.observed} empty="No batch of it ran lately. The profile:" columns=${[['batch', (one) => one.batch, 'n'], ['units', (one) => one.units, 'n'], ['batches', (one) => num(one.batches), 'n'], ['profiled', (one) => ms(one.profiled_ms), 'n'], ['predicted', (one) => ms(one.predicted_ms), 'n'], ['p50', (one) => ms(one.p50_ms), 'n'], ['p99', (one) => ms(one.p99_ms), 'n']]} />
      ${data.profile.length > 0 && html`<details open=${!data.observed.length}><summary>The whole profile</summary><${Table} label="Profile" rows=${data.profile} columns=${[['device', (one) => one.device], ['batch', (one) => one.batch, 'n'], ['units', (one) => one.units, 'n'], ['profiled', (one) => ms(one.profiled_ms), 'n'], ['planned with now', (one) => ms(one.planned_ms), 'n'], ['', (one) => (one.stale ? html`<span class="tag warn">stale</span>` : '')]]} /></details>`}</div></div>`}</section>`;
}
