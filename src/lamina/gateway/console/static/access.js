// Access: tenants and their limits, tokens, users, secrets by name, bills, audit.
import { html, useState } from './vendor/preact.js';
import { Empty, Facts, Head, Oops, Options, Segments, Table, api, cost, go, num, useAction, useLoaded, when } from './lib.js';

const PARTS = [['tenants', 'Tenants'], ['tokens', 'Tokens'], ['users', 'Users'], ['secrets', 'Secrets'], ['bills', 'Bills'], ['audit', 'Audit']];
const SCOPES = ['invoke', 'read', 'deploy', 'admin'];
const admin = (what, given = {}) => api('POST', `/v1/admin/${what}`, given);

export function Access({ parts }) {
  const part = parts[0] || 'tenants', found = { tenants: Tenants, tokens: Tokens, users: Users, secrets: Secrets, bills: Bills, audit: Audit }[part];
  return html`<${Head} title="Access" about="Which callers may do what, what they are limited to, and what they have used."><${Segments} label="Part" value=${part} options=${PARTS} onChange=${(name) => go(`/access/${name}`)} /><//>
    ${found ? html`<${found} key=${part} />` : html`<${Empty}>There is no ${part} here.<//>`}`;
}

const useList = (what) => useLoaded(() => admin(what), []);
const fields = (event) => { event.preventDefault(); return Object.fromEntries(new FormData(event.target)); };

function Tenants() {
  const { data, error, reload } = useList('tenant/list');
  const used = useLoaded(() => api('GET', `/calls/v1/bill?by=tenant&from=${new Date().toISOString().slice(0, 10)}`).then((told) => Object.fromEntries(told.rows.map((row) => [row.tenant, row])), () => ({})), [], 5000);
  const today = (one) => used.data?.[one.name];
  const [chosen, setChosen] = useState(null);
  const save = useAction(async (given) => { await admin('tenant/set', given); setChosen(null); reload(); return given; });
  const remove = useAction(async (name) => { await admin('tenant/remove', { name }); reload(); });
  const limit = (value, unit = '') => (value ? `${num(value, 1)}${unit}` : 'none');
  const set = (event) => { const given = fields(event); save.run(Object.fromEntries(Object.entries(given).filter(([, value]) => value !== '').map(([name, value]) => [name, name === 'name' ? value : Number(value)]))); };
  return html`<${Oops} error=${error} retry=${reload} /><${Oops} error=${remove.error} /><section class="card"><${Table} label="Tenants" rows=${data ?? (error ? [] : null)} empty="No tenant yet. Without tenants, all callers share everything." columns=${[['tenant', (one) => one.name], ['weight', (one) => num(one.weight, 2), 'n'], ['calls/s', (one) => limit(one.rate_per_s), 'n'], ['burst', (one) => limit(one.burst), 'n'], ['concurrent calls', (one) => limit(one.concurrent), 'n'], ['unit seconds a day', (one) => limit(one.unit_s_per_day), 'n'], ['memory', (one) => limit(one.memory_mib, ' MiB'), 'n'], ['calls today', (one) => num(today(one)?.calls ?? 0), 'n'], ['refused', (one) => num(today(one)?.refused ?? 0), 'n'], ['cost', (one) => cost(today(one)?.cost), 'n'], ['', (one) => html`<span class="nowrap"><button onClick=${() => setChosen(one)} aria-label=${`Change ${one.name}`}>Change</button> <button class="danger" disabled=${remove.busy} aria-label=${`Remove tenant ${one.name}`} onClick=${() => confirm(`Remove ${one.name}, with its tokens and users?`) && remove.run(one.name)}>Remove</button></span>`]]} /></section>
    <section class="card"><h2>${chosen ? `Limits of ${chosen.name}` : 'Add a tenant'}</h2><form class="fields" key=${chosen?.name || ''} onSubmit=${set}><div class="row">
      <label><span>Name</span><input name="name" required value=${chosen?.name || ''} readonly=${!!chosen} /></label><label><span>Weight, when all want more</span><input name="weight" type="number" min="0.01" step="any" value=${chosen?.weight ?? 1} /></label><label><span>Calls a second (empty: no limit)</span><input name="rate_per_s" type="number" min="0" step="any" value=${chosen?.rate_per_s || ''} /></label><label><span>Burst, calls</span><input name="burst" type="number" min="0" step="any" value=${chosen?.burst || ''} /></label><label><span>Concurrent calls</span><input name="concurrent" type="number" min="0" value=${chosen?.concurrent || ''} /></label><label><span>Unit seconds a day</span><input name="unit_s_per_day" type="number" min="0" step="any" value=${chosen?.unit_s_per_day || ''} /></label><label><span>Memory, MiB</span><input name="memory_mib" type="number" min="0" value=${chosen?.memory_mib || ''} /></label></div>
      <${Oops} error=${save.error} />${save.done && html`<div class="note good" role="status"><p>Tenant ${save.done.name} is set.</p></div>`}<p class="row"><button class="main" disabled=${save.busy}>${chosen ? 'Change' : 'Add'}</button>${chosen && html`<button type="button" onClick=${() => setChosen(null)}>Add another instead</button>`}</p></form></section>`;
}

function Scopes() {
  return html`<fieldset class="row"><legend class="soft">May</legend>${SCOPES.map((scope) => html`<label class="inline"><input type="checkbox" name=${`scope-${scope}`} checked=${scope === 'invoke' || scope === 'read'} /><span>${scope}</span></label>`)}</fieldset>`;
}
const scopesOf = (given) => SCOPES.filter((scope) => given[`scope-${scope}`]);

function Tokens() {
  const { data, error, reload } = useList('token/list');
  const make = useAction(async (given) => { const made = await admin('token/create', { name: given.name, scopes: scopesOf(given), expires: given.expires, ...(given.tenant && { tenant: given.tenant }) }); reload(); return made; });
  const revoke = useAction(async (id) => { await admin('token/revoke', { id }); reload(); return id; });
  return html`<${Oops} error=${error} retry=${reload} /><${Oops} error=${revoke.error} />${revoke.done && html`<div class="note good" role="status"><p>Token ${revoke.done} is revoked.</p></div>`}
    <section class="card"><${Table} label="Tokens" rows=${data ?? (error ? [] : null)} empty="No token yet. On loopback none is needed." columns=${[['name', (one) => one.name], ['id', (one) => html`<code>${one.id}</code>`], ['tenant', (one) => one.tenant || 'operator'], ['may', (one) => one.scopes.join(', ')], ['made', (one) => when(one.created_us)], ['until', (one) => when(one.expires_us)], ['', (one) => html`<button class="danger" disabled=${revoke.busy} aria-label=${`Revoke ${one.name} ${one.id}`} onClick=${() => revoke.run(one.id)}>Revoke</button>`]]} /></section>
    <section class="card"><h2>Make a token</h2>${make.done && html`<div class="note good" role="status"><p>Token ${make.done.name}. It is shown this once:</p><pre class="secret">${make.done.token}</pre></div>`}
      <form class="fields" onSubmit=${(event) => { const given = fields(event); make.run(given); }}><div class="row"><label><span>Name</span><input name="name" required /></label><label><span>Tenant (empty: operator)</span><input name="tenant" /></label><label><span>Expires in</span><input name="expires" value="30d" /></label></div><${Scopes} /><${Oops} error=${make.error} /><p><button class="main" disabled=${make.busy}>Make</button></p></form></section>`;
}

function Users() {
  const { data, error, reload } = useList('user/list');
  const invite = useAction(async (given) => { const made = await admin('user/invite', { name: given.name, scopes: scopesOf(given), ...(given.tenant && { tenant: given.tenant }) }); reload(); return made; });
  const remove = useAction(async (name) => { await admin('user/remove', { name }); reload(); });
  return html`<${Oops} error=${error} retry=${reload} /><${Oops} error=${remove.error} /><section class="card"><${Table} label="Users" rows=${data ?? (error ? [] : null)} empty="No user yet: invite one." columns=${[['name', (one) => one.name], ['tenant', (one) => one.tenant || 'operator'], ['may', (one) => one.scopes.join(', ')], ['signed up', (one) => (one.signed_up ? 'yes' : 'not yet')], ['', (one) => html`<button class="danger" aria-label=${`Remove user ${one.name}`} onClick=${() => confirm(`Remove ${one.name}?`) && remove.run(one.name)}>Remove</button>`]]} /></section>
    <section class="card"><h2>Invite a user</h2>${invite.done && html`<div class="note good" role="status"><p>Invitation for ${invite.done.name}, shown this once:</p><pre>${invite.done.code}</pre></div>`}<form class="fields" onSubmit=${(event) => invite.run(fields(event))}><div class="row"><label><span>Name</span><input name="name" required /></label><label><span>Tenant (empty: operator)</span><input name="tenant" /></label></div><${Scopes} /><${Oops} error=${invite.error} /><p><button class="main" disabled=${invite.busy}>Invite</button></p></form></section>`;
}

function Secrets() {
  const { data, error, reload } = useList('secret/list');
  const save = useAction(async (given, form) => { await admin('secret/set', { name: given.name, value: given.value, ...(given.tenant && { tenant: given.tenant }) }); form.reset(); reload(); return given.name; });
  const remove = useAction(async (one) => { await admin('secret/remove', { name: one.name, tenant: one.tenant }); reload(); });
  return html`<${Oops} error=${error} retry=${reload} /><${Oops} error=${remove.error} /><section class="card"><${Table} label="Secrets" rows=${data ?? (error ? [] : null)} empty="No secret yet. Functions read them by name; their values are never shown again." columns=${[['name', (one) => one.name], ['tenant', (one) => one.tenant || 'operator'], ['changed', (one) => when(one.changed_us)], ['', (one) => html`<button class="danger" aria-label=${`Remove secret ${one.name}`} onClick=${() => confirm(`Remove ${one.name}?`) && remove.run(one)}>Remove</button>`]]} /></section>
    <section class="card"><h2>Set a secret</h2><form class="fields" autocomplete="off" onSubmit=${(event) => { const form = event.target; save.run(fields(event), form); }}><div class="row"><label><span>Name</span><input name="name" required /></label><label><span>Tenant (empty: operator)</span><input name="tenant" /></label><label><span>Value</span><input name="value" type="password" required autocomplete="new-password" /></label></div><${Oops} error=${save.error} />${save.done && html`<div class="note good" role="status"><p>${save.done} is set.</p></div>`}<p><button class="main" disabled=${save.busy}>Set</button></p></form></section>`;
}

function Bills() {
  const [by, setBy] = useState('tenant,target'), [from, setFrom] = useState(''), [to, setTo] = useState('');
  const { data, error, reload } = useLoaded((signal) => api('GET', `/calls/v1/bill?${new URLSearchParams({ by, ...(from && { from }), ...(to && { to }) })}`, undefined, { signal }), [by, from, to]);
  const rows = data && data.rows, names = by.split(',');
  const total = (rows || []).reduce((sum, row) => ({ calls: sum.calls + (row.calls || 0), cost: sum.cost + (row.cost || 0) }), { calls: 0, cost: 0 });
  return html`<div class="row filter"><label class="inline"><span>By</span><select value=${by} onChange=${(event) => setBy(event.target.value)}><${Options} value=${by} of=${[['tenant,target', 'tenant and target'], ['tenant', 'tenant'], ['day,tenant', 'day and tenant'], ['function', 'function']]} /></select></label><label class="inline"><span>From</span><input type="date" value=${from} onInput=${(event) => setFrom(event.target.value)} /></label><label class="inline"><span>To</span><input type="date" value=${to} onInput=${(event) => setTo(event.target.value)} /></label></div>
    <${Oops} error=${error} retry=${reload} /><section class="card"><${Table} label="Bill" rows=${rows ?? (error ? [] : null)} empty="Nothing was spent in this time." columns=${[...names.map((name) => [name, (row) => row[name] || '–']), ['calls', (row) => num(row.calls), 'n'], ['in time', (row) => num(row.met), 'n'], ['refused', (row) => num(row.refused), 'n'], ['failed', (row) => num(row.failed), 'n'], ['cost', (row) => cost(row.cost), 'n']]} />${rows?.length > 0 && html`<${Facts} of=${[['calls in all', num(total.calls)], ['cost in all', cost(total.cost)]]} />`}</section>`;
}

function Audit() {
  const { data, error, reload } = useLoaded(() => admin('audit/list', { limit: 200 }), []);
  return html`<${Oops} error=${error} retry=${reload} /><section class="card"><${Table} label="Audit" rows=${data ? [...data].reverse() : error ? [] : null} empty="Nothing was changed yet." columns=${[['when', (one) => when(one.at_us)], ['by', (one) => one.who || 'local'], ['did', (one) => (one.ok === false ? `${one.what}, refused` : one.what)], ['to', (one) => html`<span class="clip">${one.subject || ''}</span>`], ['note', (one) => html`<span class="break small">${one.note || ''}</span>`], ['tenant', (one) => one.tenant || '–']]} /></section>`;
}
