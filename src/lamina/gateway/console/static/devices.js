// Devices: units down, time across. Every batch is a rectangle; its predicted edge is a line, what is booked an outline.
import { html, useState, useEffect, useRef } from './vendor/preact.js';
import { live, useLive, serverNow, onEnded } from './feed.js';
import { Bar, BASE, Chart, Empty, Facts, FunctionName, Head, Meter, Oops, Segments, Swatch, Table, colour, cost, mib, ms, num, pct, shade, to, useScheme } from './lib.js';

const GUTTER = 40, FUTURE = 0.1;

/** A map that draws every ended batch once, into a ring of pixels, and blits it: the cost of a picture does not grow with the time shown. */
export class SliceMap {
  constructor(canvas, device, units, spanUs) {
    Object.assign(this, { canvas, device, units, spanUs, context: canvas.getContext('2d'), ring: document.createElement('canvas') });
    this.homes = [];
    this.pictures = 0;
    this.resize();
  }

  resize() {
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    this.ratio = ratio;
    this.rowHeight = Math.max(3, Math.floor(Math.max(108, Math.min(240, this.units * 14)) / this.units));
    const height = this.rowHeight * this.units + 22;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.max(200, Math.round(this.canvas.clientWidth * ratio));
    this.canvas.height = Math.round(height * ratio);
    this.row = this.rowHeight * ratio;
    this.left = Math.round(GUTTER * ratio);
    this.plot = Math.round((this.canvas.width - this.left) * (1 - FUTURE));
    this.ring.width = this.plot;
    this.ring.height = Math.round(this.row * units(this));
    this.paint = this.ring.getContext('2d');
    this.style = { ink: colour('--ink'), soft: colour('--soft'), grid: colour('--grid'), shade: colour('--shade'), line: colour('--line'), bad: colour('--bad'), card: colour('--card'), fill: Array.from({ length: 10 }, (_, at) => colour(`--c${at}`)) };
    this.restart();
  }

  restart() {
    this.base = serverNow() - this.spanUs;
    this.scale = this.plot / this.spanUs;
    this.headPixel = -1;
    this.paint.clearRect(0, 0, this.ring.width, this.ring.height);
    const from = serverNow() - this.spanUs;
    this.waiting = (live.batches.get(this.device) || []).filter((batch) => batch.end > from);
  }

  pixel(us) { return Math.floor((us - this.base) * this.scale); }

  advance(pixel) {
    if (this.headPixel < 0 || pixel - this.headPixel >= this.plot) this.paint.clearRect(0, 0, this.plot, this.ring.height);
    else for (let at = this.headPixel + 1; at <= pixel; at += 1) this.paint.clearRect(((at % this.plot) + this.plot) % this.plot, 0, 1, this.ring.height);
    this.headPixel = pixel;
  }

  wrapped(from, to, draw) {
    from = Math.max(from, this.headPixel - this.plot + 1);
    to = Math.min(to, this.headPixel + 1);
    while (from < to) {
      const at = ((from % this.plot) + this.plot) % this.plot, width = Math.min(to - from, this.plot - at);
      draw(at, width);
      from += width;
    }
  }

  add(batch) {
    const { paint, row } = this, y = batch.first * row, height = Math.max(1, batch.units * row - 1);
    const begin = this.pixel(batch.begin), end = Math.max(begin + 1, this.pixel(batch.end) - (this.pixel(batch.end) - begin > 3 ? 1 : 0));
    paint.fillStyle = batch.error ? this.style.bad : this.style.fill[shade(batch.name)];
    this.wrapped(begin, end, (x, width) => paint.fillRect(x, y, width, height));
    const due = this.pixel(batch.begin + batch.predicted);
    if (due > begin && due < end - 1) {
      paint.fillStyle = this.style.bad;
      this.wrapped(due, end, (x, width) => paint.fillRect(x, y + height - Math.max(2, height / 5), width, Math.max(2, height / 5)));
      paint.fillStyle = this.style.card;
      this.wrapped(due, due + 1, (x, width) => paint.fillRect(x, y, width, height));
    } else if (due - end > 2) {
      paint.fillStyle = this.style.soft;
      paint.globalAlpha = 0.55;
      this.wrapped(end, due, (x, width) => paint.fillRect(x, y + Math.floor(height / 2), width, 1));
      this.wrapped(due - 1, due, (x, width) => paint.fillRect(x, y + Math.floor(height / 4), width, Math.max(2, Math.floor(height / 2))));
      paint.globalAlpha = 1;
    }
  }

  draw(now) {
    const { context, row, left, plot, style, ratio } = this, height = row * this.units, wide = this.canvas.width;
    this.pictures += 1;
    const head = this.pixel(now);
    if (head !== this.headPixel) this.advance(head);
    if (this.waiting.length) {
      const later = [];
      for (const batch of this.waiting) if (batch.end <= now) this.add(batch); else later.push(batch);
      this.waiting = later;
    }
    context.clearRect(0, 0, wide, this.canvas.height);
    context.fillStyle = style.shade;
    context.fillRect(left, 0, wide - left, height);
    context.fillStyle = style.grid;
    for (let unit = 1; unit < this.units; unit += this.units > 40 ? 10 : 1) context.fillRect(left, Math.round(unit * row) - 1, wide - left, 1);
    const cut = (((head + 1) % plot) + plot) % plot;
    if (plot - cut) context.drawImage(this.ring, cut, 0, plot - cut, height, left, 0, plot - cut, height);
    if (cut) context.drawImage(this.ring, 0, 0, cut, height, left + plot - cut, 0, cut, height);
    const across = (us) => left + plot + (us - now) * this.scale;
    for (const batch of live.open.values()) {
      if (batch.device !== this.device || batch.decided > now) continue;
      const y = batch.first * row, tall = Math.max(1, batch.units * row - 1), due = across(batch.begin + batch.predicted);
      if (batch.behind || batch.begin > now) {
        context.setLineDash([3 * ratio, 2 * ratio]);
        context.strokeStyle = style.fill[shade(batch.name)];
        context.lineWidth = ratio;
        context.strokeRect(Math.max(left + plot, across(batch.begin)) + 0.5, y + 0.5, Math.max(2, batch.predicted * this.scale), tall - 1);
        context.setLineDash([]);
        continue;
      }
      const x = Math.max(left, across(batch.begin)), until = left + plot;
      context.fillStyle = style.fill[shade(batch.name)];
      context.fillRect(x, y, Math.max(1, until - x), tall);
      context.globalAlpha = 0.35;
      if (due > until) context.fillRect(until, y, Math.min(wide, due) - until, tall);
      context.globalAlpha = 1;
      if (due < until) { context.fillStyle = style.bad; context.fillRect(Math.max(x, due), y + tall - Math.max(2, tall / 5), until - Math.max(x, due), Math.max(2, tall / 5)); }
      if (tall > 10 * ratio && until - x > 70 * ratio) { context.fillStyle = style.card; context.font = `${11 * ratio}px system-ui`; context.fillText(batch.name.slice(0, 24), x + 5 * ratio, y + tall / 2 + 4 * ratio, until - x - 8 * ratio); }
    }
    context.fillStyle = style.ink;
    context.fillRect(left + plot, 0, Math.max(1, ratio), height);
    for (const home of this.homes) {
      context.fillStyle = style.fill[shade(home.function)];
      context.globalAlpha = home.lent ? 0.45 : 1;
      context.fillRect(left - 9 * ratio, home.first * row, 6 * ratio, home.units * row - 1);
      context.globalAlpha = 1;
    }
    context.fillStyle = style.soft;
    context.font = `${11 * ratio}px system-ui`;
    context.textAlign = 'right';
    const step = this.units > 40 ? 20 : this.units > 10 ? 5 : 1;
    for (let unit = 0; unit < this.units; unit += step) context.fillText(String(unit), left - 12 * ratio, unit * row + Math.max(9 * ratio, row / 2 + 4 * ratio));
    context.fillText('unit', left - 12 * ratio, height + 16 * ratio);
    context.textAlign = 'center';
    for (let part = 0; part <= 4; part += 1) {
      const x = left + (plot * part) / 4, back = (this.spanUs * (1 - part / 4)) / 1e6;
      context.fillText(back ? `−${num(back, 1)} s` : 'now', Math.max(left + 18 * ratio, Math.min(wide - 16 * ratio, x)), height + 16 * ratio);
    }
    context.textAlign = 'left';
  }

  find(x, y, now) {
    const unit = Math.floor((y * this.ratio) / this.row), us = now + (x * this.ratio - this.left - this.plot) / this.scale;
    const fits = (batch) => batch.device === this.device && unit >= batch.first && unit < batch.first + batch.units && us >= batch.begin && us <= (batch.end || Math.max(now, batch.begin + batch.predicted));
    for (const batch of live.open.values()) if (fits(batch)) return batch;
    const kept = live.batches.get(this.device) || [];
    for (let at = kept.length - 1; at >= 0 && kept[at].end > us - 1e6; at -= 1) if (fits(kept[at])) return kept[at];
    return null;
  }
}
const units = (map) => map.units;

function describe(batch) {
  const real = batch.end ? `took ${ms((batch.end - batch.begin) / 1000)}` : 'running';
  return `${batch.name}: ${batch.jobs} ${batch.jobs === 1 ? 'job' : 'jobs'}\nunits ${batch.first} to ${batch.first + batch.units - 1}\npredicted ${ms(batch.predicted / 1000)}, ${real}${batch.error ? `\nfailed: ${batch.error}` : ''}`;
}

function Map2({ device, spanUs, paused }) {
  const canvas = useRef(), map = useRef(null), tip = useRef(), stopped = useRef(0);
  const scheme = useScheme();
  useEffect(() => {
    const made = map.current = new SliceMap(canvas.current, device.id, device.units, spanUs);
    (window.laminaMaps ||= new Map()).set(device.id, made);
    const off = onEnded((batch) => { if (!batch) made.restart(); else if (batch.device === device.id) made.waiting.push(batch); });
    let frame = 0;
    const turn = () => {
      frame = requestAnimationFrame(turn);
      if (live.offset === null || paused) return;
      made.draw((stopped.current = serverNow()));
    };
    turn();
    const watch = new ResizeObserver(() => { if (Math.abs(canvas.current.clientWidth * made.ratio - canvas.current.width) > 2) { made.resize(); made.draw(stopped.current || serverNow()); } });
    watch.observe(canvas.current);
    if (paused && stopped.current) { made.draw(stopped.current); }
    return () => { cancelAnimationFrame(frame); watch.disconnect(); off(); window.laminaMaps.delete(device.id); };
  }, [device.id, device.units, spanUs, scheme, paused]);
  useEffect(() => { if (map.current) map.current.homes = device.homes; });
  const move = (event) => {
    const box = canvas.current.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = map.current?.find(x, y, paused ? stopped.current : serverNow());
    tip.current.hidden = !found;
    if (found) { tip.current.textContent = describe(found); tip.current.style.left = `${Math.min(x + 12, box.width - 210)}px`; tip.current.style.top = `${y + 14}px`; }
  };
  return html`<div class="map"><canvas ref=${canvas} role="img" aria-label=${`Slices of ${device.id} over time; the table below has the same batches`} onMouseMove=${move} onMouseLeave=${() => { tip.current.hidden = true; }}></canvas><div class="tip" ref=${tip} hidden></div></div>`;
}

function Batches({ device }) {
  const running = [...live.open.values()].filter((batch) => batch.device === device.id);
  const last = (live.batches.get(device.id) || []).slice(-20).reverse();
  return html`<details><summary>Batches as a table</summary><${Table} label=${`Batches of ${device.id}`} rows=${[...running, ...last].slice(0, 40)} empty="No batch in the last minute." columns=${[
    ['function', (one) => html`<${Swatch} name=${one.name} />${one.name}`], ['state', (one) => (one.end ? (one.error ? `failed: ${one.error}` : 'done') : one.behind ? 'booked' : 'running')],
    ['units', (one) => (one.units > 1 ? `${one.first}–${one.first + one.units - 1}` : one.first), 'n'], ['jobs', (one) => one.jobs, 'n'], ['predicted', (one) => ms(one.predicted / 1000), 'n'],
    ['real', (one) => (one.end ? ms((one.end - one.begin) / 1000) : '–'), 'n'], ['of predicted', (one) => (one.end ? pct((one.end - one.begin) / one.predicted, 0) : '–'), 'n']]} /></details>`;
}

function clockFacts(clocks) {
  if (!clocks) return [];
  return [['SM clock', `${num(clocks.sm_mhz)} of ${num(clocks.max_sm_mhz)} MHz`], ['memory clock', `${num(clocks.memory_mhz)} MHz`], ['power', `${num(clocks.power_w)} of ${num(clocks.max_power_w)} W`], ['temperature', `${num(clocks.temperature_c)} °C`],
    clocks.slowed_by.length > 0 && ['slowed by', html`<span class="warn-text">${clocks.slowed_by.join(', ')}</span>`]];
}

function Device({ device, spanUs, paused, node }) {
  const owners = Object.entries(device.memory_by_function).filter(([, size]) => size > 0);
  const seen = new Set([...live.open.values(), ...(live.batches.get(device.id) || []).slice(-400)].filter((one) => one.device === device.id).map((one) => one.name));
  const told = device.executor, what = device.family === 'cpu' ? (device.units === 1 ? 'core' : 'cores') : 'units';
  return html`<section class="card"><h2>${device.id} <span class="soft">${device.kind}, ${device.units} ${what}${device.soft ? ', soft slices' : ''}${device.emulated ? ', emulated' : ''}${device.node ? `, on node ${device.node}` : ''}</span>${node && node.state !== 'live' && html` <span class="tag warn">node ${node.state}</span>`}</h2>
    <${Map2} device=${device} spanUs=${spanUs} paused=${paused} />
    <ul class="legend" aria-label="Functions seen">${[...seen].sort().slice(0, 14).map((name) => html`<li><${FunctionName} name=${name} /></li>`)}${seen.size > 14 && html`<li class="soft">and ${seen.size - 14} more</li>`}${!seen.size && html`<li class="soft">No batch ran here yet.</li>`}</ul>
    <${Facts} of=${[
      ['leased, last 10 s', pct(device.held)], ['leased now', `${device.leased} of ${device.units} ${what}`], ['way there and back', ms(device.way_ms)],
      device.memory_mib > 0 && ['memory', `${mib(device.memory_used_mib)} of ${mib(device.memory_mib)}`], device.bandwidth !== null && ['memory bandwidth', `${pct(device.bandwidth, 0)}, ${device.bandwidth_from === 'profiles' ? 'by profiles' : device.bandwidth_from}`],
      device.homes.length > 0 && ['homes', `${device.homes.length}, ${device.homes.filter((home) => home.lent).length} lent now`], ...clockFacts(told?.clocks),
      told && ['executor', `pid ${told.pid}${told.restarts ? `, ${told.restarts} restarts` : ''}${told.standing_by ? ', standby ready' : ''}`]]} />
    ${owners.length > 0 && html`<p class="soft small">Memory by function</p><${Bar} label=${`Memory of ${device.id} by function`} total=${device.memory_mib} parts=${owners.map(([name, size]) => [`${name}: ${mib(size)}`, size, `f${shade(name)}`])} />
      <ul class="legend">${owners.slice(0, 8).map(([name, size]) => html`<li><${Swatch} name=${name} />${name} <span class="soft">${mib(size)}</span></li>`)}${owners.length > 8 && html`<li class="soft">and ${owners.length - 8} more</li>`}</ul>`}
    ${device.homes.length > 0 && html`<details><summary>Homes and lending as a table</summary><${Table} label=${`Homes on ${device.id}`} rows=${device.homes} columns=${[['function', (one) => html`<${Swatch} name=${one.function} />${one.function}`], ['units', (one) => (one.units > 1 ? `${one.first}–${one.first + one.units - 1}` : one.first), 'n'], ['lent now', (one) => (one.lent ? 'yes' : 'no')], ['share of time', (one) => pct(one.time, 0), 'n']]} /></details>`}
    <${Batches} device=${device} /></section>`;
}

export function Verdict({ verdict }) {
  const { state, target } = verdict, kind = { good: 'good', idle: '', late: 'bad', refusing: 'warn', failing: 'bad' }[state] || '';
  const [what, path] = { failing: ['Failed calls', 'calls?outcome=failed&'], late: ['Late calls', 'calls?outcome=late&'] }[state] || ['Refusals', 'refusals?'];
  return html`<div class="verdict" aria-label="Verdict">
    <div class=${kind}><h2>Is everything in time?</h2><p>${verdict.in_time}</p>${target && html`<p class="small"><a href=${`${BASE}/${path}target=${encodeURIComponent(target)}`}>${what} of ${target}</a></p>`}</div>
    <div class=${state === 'good' || state === 'idle' ? kind : 'warn'}><h2>What is the bottleneck?</h2><p>${verdict.bottleneck}</p></div>
    <div class=${state === 'good' ? 'good' : ''}><h2>What would help?</h2><p>${verdict.help}</p>${verdict.more_of && html`<p class="small"><a href=${`${BASE}/plan?more=${encodeURIComponent(verdict.more_of)}`}>Simulate one more ${verdict.more_of}</a></p>`}</div></div>`;
}

export function Feedless({ what }) {
  if (live.state === 'forbidden') return html`<${Oops} error=${live.error} /><${Empty}>${what} shows calls of all tenants, and is for operators. Runs, Apps and the Playground show what is yours.<//>`;
  return html`<${Empty}>Waiting for the server: ${live.state === 'lost' ? 'the connection is lost, and is tried again.' : 'connecting.'}<//>`;
}

function Nodes({ cluster }) {
  const down = cluster.nodes.filter((node) => node.state !== 'live');
  return html`<p class="row small"><span><strong>${num(cluster.nodes.length)}</strong> ${cluster.nodes.length === 1 ? 'node' : 'nodes'}, led by this server in epoch ${cluster.epoch}</span>${cluster.nodes.slice(0, 24).map((node) => html`<span class=${`tag ${node.state === 'live' ? 'good' : node.state === 'lost' ? 'bad' : 'warn'}`}>${node.name}${node.state === 'live' ? '' : `: ${node.state}`}</span>`)}<a href=${to('cluster')}>${down.length ? `${down.length} not live: Cluster` : 'Cluster'}</a></p>`;
}

const offered = (one) => one.met + one.late + one.failed + one.refused;

export function Devices() {
  const { pulse, history, leftOut } = useLive();
  const [seconds, setSeconds] = useState(10), [paused, setPaused] = useState(false), [all, setAll] = useState(false);
  if (!pulse) return html`<${Head} title="Devices" /><${Feedless} what="This view" />`;
  const shown = all ? pulse.devices : pulse.devices.slice(0, 8), recent = history.slice(-120), over = pulse.window_s >= 59 ? 'last minute' : `last ${num(Math.max(1, pulse.window_s))} s`;
  const nodes = new Map((pulse.cluster?.nodes || []).map((node) => [node.name, node]));
  return html`<${Head} title="Devices"><${Segments} label="Time shown" value=${seconds} options=${[[2, '2 s'], [10, '10 s'], [60, '60 s']]} onChange=${setSeconds} />
      <button aria-pressed=${String(paused)} onClick=${() => setPaused(!paused)}>${paused ? 'Go on' : 'Pause'}</button><//>
    <${Verdict} verdict=${pulse.verdict} />
    ${pulse.cluster && html`<${Nodes} cluster=${pulse.cluster} />`}
    ${!shown.length && html`<${Empty}>No device has joined. A server has its cores, or the GPUs it finds; lamina doctor says what this machine has.<//>`}
    <div class="grid">${shown.map((device) => html`<${Device} key=${device.id} device=${device} spanUs=${seconds * 1e6} paused=${paused} node=${nodes.get(device.node)} />`)}</div>
    ${shown.length > 0 && html`<p class="soft small">Units down, time across. A rectangle is a batch, as wide as it took. Red at its foot: longer than predicted. A thin line behind it: predicted, and not needed. Dashed: booked. Right of now: predicted. Bars at the left edge: homes, pale while lent.${leftOut > 0 && ` ${num(leftOut)} short batches found no room in the picture.`}</p>`}
    ${pulse.devices.length > shown.length && html`<p><button onClick=${() => setAll(true)}>Show ${pulse.devices.length - shown.length} more devices</button></p>`}
    <div class="grid"><section class="card"><h2>Calls a second <span class="soft">by how they ended</span></h2>
      <${Chart} label="Calls a second by how they ended" unit="/s" series=${[['in time', '--c1'], ['late', '--c2'], ['refused', '--c4'], ['failed', '--c3']]} data=${[recent.map((one) => one.wall), ...[0, 1, 3, 2].map((at) => recent.map((one) => one.rate[at]))]} /></section>
      <section class="card"><h2>Device time by function <span class="soft">last 10 s, 100 % is a whole device</span></h2>
      <${Table} label="Device time by function" rows=${pulse.functions.slice(0, 14)} empty="No function ran in the last seconds." columns=${[['function', (one) => html`<${FunctionName} name=${one.name} />`], ['leased', (one) => pct(one.held), 'n'], ['computing', (one) => pct(one.used), 'n'], ['jobs/s', (one) => num(one.jobs_per_s), 'n'], ['per batch', (one) => num(one.batches_per_s ? one.jobs_per_s / one.batches_per_s : null, 1), 'n'], ['queue', (one) => num(one.queue), 'n']]} /></section></div>
    <section class="card"><h2>Targets <span class="soft">calls of the ${over}</span></h2>
      <${Table} label="Targets" rows=${pulse.targets.filter((one) => offered(one) > 0).slice(0, 20)} empty=${`No calls in the ${over}. The Playground has a form for each function.`} columns=${[['target', (one) => html`<${FunctionName} name=${one.name} />`], ['calls', (one) => num(offered(one)), 'n'], ['in time', (one) => html`<${Meter} part=${one.met / Math.max(1, offered(one))} goal=${one.goal} />`], ['late', (one) => num(one.late), 'n'], ['refused', (one) => num(one.refused), 'n'], ['failed', (one) => num(one.failed), 'n'], ['p50', (one) => ms(one.p50_ms), 'n'], ['p99', (one) => ms(one.p99_ms), 'n'], ['SLO', (one) => ms(one.slo_ms), 'n'], ['cost', (one) => cost(one.cost), 'n']]} />
      <${Facts} of=${[['waiting', `${num(pulse.queued)} jobs`], ['under way', `${num(pulse.calls)} calls`], ['longest time unread, last 10 s', ms(pulse.lag_ms)], ['last decision took', ms(pulse.decision_us / 1000)]]} /></section>`;
}
