// Cluster: machines whose agents serve together, their states, and the epoch of the one that leads.
import { html } from './vendor/preact.js';
import { Empty, Facts, Head, Oops, Table, ago, api, mib, ms, num, to, useAction, useLoaded } from './lib.js';

const KIND = { live: 'good', ready: 'good', open: 'good', alive: 'good', suspect: 'warn', draining: 'warn', lost: 'bad', dead: 'bad', closed: '' };

export function Cluster() {
  const { data, error, reload } = useLoaded((signal) => api('GET', '/v1/nodes', undefined, { signal }), [], 2000);
  const drain = useAction(async (name) => { await api('POST', `/v1/nodes/${encodeURIComponent(name)}/drain`); reload(); return name; });
  const epochs = [...new Set((data || []).map((node) => node.epoch))];
  return html`<${Head} title="Cluster" about="Machines whose agents have joined this server. A node that is silent for too long is lost, and its calls are served elsewhere." /><${Oops} error=${error} retry=${reload} /><${Oops} error=${drain.error} />
    ${drain.done && html`<div class="note good" role="status"><p>${drain.done} takes nothing new, and finishes what it has.</p></div>`}
    ${data && !data.length && html`<${Empty}>This server stands alone. Start it with --agents HOST:PORT and lamina agent on another machine, and its devices appear here.<//>`}
    ${data?.length > 0 && html`<section class="card"><${Facts} of=${[['nodes', data.length], ['leader', `this server, in epoch ${epochs.join(', ')}`], ['devices', num(data.reduce((sum, node) => sum + node.devices.length, 0))]]} />
      <${Table} label="Nodes" rows=${data} columns=${[['node', (one) => one.name], ['state', (one) => html`<span class=${`tag ${KIND[one.state] || ''}`}>${one.state}</span>`], ['incarnation', (one) => html`<code>${String(one.incarnation).slice(0, 10)}</code>`], ['address', (one) => one.address || '–'], ['heard', (one) => ago(one.silent_ms), 'nowrap'], ['round trip', (one) => ms(one.rtt_us / 1000), 'n'], ['lag', (one) => ms(one.lag_us / 1000), 'n'], ['devices', (one) => one.devices.map((device) => `${device.id}: ${device.units} units, ${mib(device.memory_mib)}`).join('; ') || '–'], ['instances', (one) => num(one.instances.length), 'n'], ['packages', (one) => num(one.packages.length), 'n'], ['', (one) => html`<button class="nowrap" aria-label=${`Drain ${one.name}`} disabled=${drain.busy || one.state !== 'live'} onClick=${() => drain.run(one.name)}>Drain</button>`]]} /></section>
    <p class="soft">Their slices over time are under <a href=${to('devices')}>Devices</a>.</p>`}`;
}
