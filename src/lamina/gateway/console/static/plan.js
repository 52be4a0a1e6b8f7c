// Plan: other rates, goals and devices, played by the simulator on what this server has learnt.
import { html, useState, useEffect } from './vendor/preact.js';
import { Empty, Facts, Head, Meter, Oops, Options, Table, api, ms, num, pct, useAction, useLoaded } from './lib.js';

const moved = (now, then, better = 1) => (Math.abs(then - now) < 5e-4 ? '' : html` <span class=${(then - now) * better > 0 ? 'good-text' : 'bad-text'}>${then > now ? '+' : '−'}${num(100 * Math.abs(then - now), 1)}</span>`);

export function Outcome({ result, target }) {
  const { now, then } = result, before = new Map(now.targets.map((one) => [one.target, one]));
  return html`<div role="status"><p class="say"><strong class="big">${pct(then.attainment)}</strong> of calls in time, instead of ${pct(now.attainment)} as it is now.</p>
    <${Facts} of=${[['rent', `${num(then.rent_per_s, 2)} a second${then.rent_per_s === now.rent_per_s ? ', as now' : ` instead of ${num(now.rent_per_s, 2)}`}`], ['cost of the leased units', `${num(then.used_per_s, 2)} a second instead of ${num(now.used_per_s, 2)}`]]} />
    <${Table} label="Attainment by target" rows=${then.targets} chosen=${(one) => one.target === target} columns=${[['target', (one) => html`<span class="clip short" title=${one.target.slice(0, 300)}>${one.target}</span>`], ['calls/s', (one) => num(one.rate, 1), 'n'], ['in time', (one) => html`<${Meter} part=${one.attainment} goal=${0.99} />`], ['was', (one) => pct(before.get(one.target)?.attainment), 'n'], ['p99', (one) => ms(one.p99_ms), 'n'], ['SLO', (one) => ms(one.slo_ms), 'n']]} />
    <${Table} label="Devices" rows=${then.devices} columns=${[['device', (one) => one.device], ['kind', (one) => one.kind], ['leased', (one) => html`<${Meter} kind="plain" part=${one.utilisation} />${moved(now.devices.find((other) => other.device === one.device)?.utilisation ?? one.utilisation, one.utilisation, -1)}`]]} />
    <p class="soft small">${result.how[0].toUpperCase()}${result.how.slice(1)}: ${num(then.offered)} calls in ${num(then.seconds, 1)} s with policy ${result.policy}, seed ${result.seed}. Rent is the price of all devices.</p></div>`;
}

function Slider({ label, value, min, max, step = 1, onInput, show = num }) {
  return html`<label><span>${label}: <strong>${show(value)}</strong></span><input type="range" min=${min} max=${max} step=${step} value=${value} onInput=${(event) => onInput(Number(event.target.value))} /></label>`;
}

export function Plan({ query }) {
  const { data, error, reload } = useLoaded((signal) => api('GET', '/v1/console/plan', undefined, { signal }), []);
  const [scale, setScale] = useState(1), [ease, setEase] = useState(1), [devices, setDevices] = useState({}), [rates, setRates] = useState({}), [goals, setGoals] = useState({});
  const body = () => ({ scale, devices, rates: { ...Object.fromEntries((data?.targets || []).filter((one) => one.known).map((one) => [one.name, one.rate])), ...rates }, goals_ms: { ...(ease !== 1 && Object.fromEntries((data?.targets || []).filter((one) => one.slo_ms && one.known && (one.rate > 0 || rates[one.name] > 0)).map((one) => [one.name, ease * one.slo_ms]))), ...goals }, seconds: 10 });
  const play = useAction(() => api('POST', '/v1/console/plan', body()));
  const save = useAction(async () => {
    const { scenario } = await api('POST', '/v1/console/scenario', body());
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([scenario], { type: 'application/toml' }));
    link.download = 'scenario.toml';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    return scenario;
  });
  useEffect(() => { const more = query.get('more'); if (data && more && data.devices[more]) setDevices({ [more]: data.devices[more] + 1 }); }, [data]);
  if (!data) return html`<${Head} title="Plan" /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const called = data.targets.filter((one) => one.rate > 0 || rates[one.name] > 0), idle = data.targets.filter((one) => !called.includes(one));
  return html`<${Head} title="Plan" about="What if there were more calls, other goals, or more devices? The simulator plays it with the profiles that this server has learnt, in a process of its own. Figures are simulated." />
    <${Oops} error=${error} retry=${reload} />
    <div class="split later"><section class="card"><h2>What if</h2>
      <div class="sliders"><${Slider} label="All rates" value=${scale} min="0.25" max="5" step="0.25" onInput=${setScale} show=${(value) => `× ${num(value, 2)}`} />
      <${Slider} label="All SLOs" value=${ease} min="0.25" max="4" step="0.25" onInput=${setEase} show=${(value) => `× ${num(value, 2)}`} />
      ${Object.entries(data.devices).map(([kind, count]) => html`<${Slider} label=${`Devices of kind ${kind}`} value=${devices[kind] ?? count} min="0" max=${Math.max(8, 2 * count)} onInput=${(value) => setDevices({ ...devices, [kind]: value })} show=${(value) => `${value}${value === count ? ' (as now)' : ''}`} />`)}</div>
      <p></p><${Table} label="Rates and goals" rows=${called} empty="No call came in the last minute: call the server first, or set a rate below." columns=${[['target', (one) => html`<span class="clip short" title=${one.name.slice(0, 300)}>${one.name}</span>`], ['calls a second', (one) => html`<input type="number" min="0" max="100000" step="any" aria-label=${`Calls of ${one.name} a second`} value=${rates[one.name] ?? one.rate} onInput=${(event) => setRates({ ...rates, [one.name]: Number(event.target.value) })} />`], ['SLO, ms', (one) => html`<input type="number" min="0.1" step="any" aria-label=${`SLO of ${one.name} in milliseconds`} value=${goals[one.name] ?? (one.slo_ms ? ease * one.slo_ms : '')} onInput=${(event) => { const next = { ...goals, [one.name]: Number(event.target.value) }; if (!next[one.name]) delete next[one.name]; setGoals(next); }} />`], ['', (one) => (one.known ? '' : html`<span class="tag warn">nothing learnt yet</span>`)]]} />
      ${idle.length > 0 && html`<p><label class="inline"><span>Add a target that is not called now</span><select value="" onChange=${(event) => event.target.value && setRates({ ...rates, [event.target.value]: 10 })}><${Options} value="" of=${[['', 'choose'], ...idle.filter((one) => one.known).slice(0, 200).map((one) => one.name)]} /></select></label></p>`}
      <p class="row"><button class="main" disabled=${play.busy} onClick=${() => play.run()}>${play.busy ? 'Simulating' : 'Simulate'}</button><button disabled=${save.busy} onClick=${() => save.run()}>Save as scenario</button><button onClick=${() => { setScale(1); setEase(1); setDevices({}); setRates({}); setGoals({}); play.clear(); save.clear(); }}>As it is now</button></p>
      <${Oops} error=${save.error} />${save.done && html`<details open><summary>scenario.toml, for lamina sim and lamina plan</summary><pre>${save.done}</pre></details>`}</section>
    <section class="card"><h2>What would come of it</h2><${Oops} error=${play.error} />${play.done ? html`<${Outcome} result=${play.done} />` : html`<${Empty}>${play.busy ? 'The simulator plays ten seconds of calls, as it is and as it would be.' : 'Move a slider and simulate. Nothing of the server changes.'}<//>`}</section></div>`;
}
