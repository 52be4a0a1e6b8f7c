// Apps: versions, rollout, canary weights, deploy, roll back, logs.
import { html, useState, useEffect, useRef } from './vendor/preact.js';
import { Empty, Facts, Head, Meter, Oops, Options, Table, api, failure, num, request, to, useAction, useLoaded, when } from './lib.js';
import { lines } from './forms.js';

const KIND = { serving: 'good', rolling: 'warn', halted: 'bad' };

export function Apps({ parts }) {
  if (parts[0] && parts[0] !== 'deploy') return html`<${AppPage} key=${parts[0]} name=${parts[0]} />`;
  const { data, error, reload } = useLoaded((signal) => api('GET', '/v1/apps', undefined, { signal }), [], 2000);
  return html`<${Head} title="Apps" about="What is deployed. A new version takes over instance by instance while calls go on; one that cannot be loaded is taken back." />
    <${Oops} error=${error} retry=${reload} />
    <section class="card"><${Table} label="Apps" rows=${data ?? (error ? [] : null)} href=${(one) => to('apps', one.app)} empty="No app is deployed yet: deploy one below." columns=${[['app', (one) => one.app], ['version', (one) => (one.version ? one.version : 'of the file'), 'n'], ['state', (one) => html`<span class=${`tag ${KIND[one.state]}`}>${one.state}</span>`], ['functions', (one) => num(one.functions.length), 'n'], ['workflows', (one) => num(one.workflows.length), 'n'], ['instances', (one) => num(one.functions.reduce((sum, each) => sum + each.ready, 0)), 'n'], ['tenant', (one) => one.tenant || '–']]} /></section>
    <section class="card"><h2>Deploy an app</h2><${Deploy} done=${reload} /></section>`;
}

async function sha256(blob) {
  if (!globalThis.crypto?.subtle) throw new Error('a browser computes the hash of a package on https or on this machine alone: use lamina deploy');
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', await blob.arrayBuffer()));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

function Deploy({ app = '', done }) {
  const [name, setName] = useState(app), [file, setFile] = useState(null), [entry, setEntry] = useState('app.py');
  const send = useAction(async () => {
    const hash = await sha256(file);
    const response = await request('PUT', `/v1/apps/${encodeURIComponent(name)}`, { body: file, headers: { 'content-type': 'application/zip', 'lamina-sha256': hash, 'lamina-entry': entry } });
    if (!response.ok) throw await failure(response);
    done();
    return response.json();
  });
  return html`<form class="fields" onSubmit=${(event) => { event.preventDefault(); send.run(); }}>
    <div class="row">${!app && html`<label><span>Name</span><input required value=${name} onInput=${(event) => setName(event.target.value)} pattern="[a-z0-9][a-z0-9._\\-]{0,62}" /></label>`}
      <label><span>Package, a zip with the code</span><input type="file" accept=".zip,application/zip" required onChange=${(event) => setFile(event.target.files[0])} /></label><label><span>File with the app</span><input required value=${entry} onInput=${(event) => setEntry(event.target.value)} /></label></div>
    <${Oops} error=${send.error} />${send.done && html`<div class="note good" role="status"><p>Version ${send.done.version} of ${send.done.app} is ${send.done.state}.</p></div>`}
    <p><button class="main" disabled=${send.busy || !file}>${send.busy ? 'Deploying' : 'Deploy'}</button></p></form>`;
}

/** A square for each instance: its version by colour, its phase by shape. */
function Instances({ each }) {
  const look = (one) => (one.phase === 'draining' ? 'f7' : one.phase === 'loading' ? 'warming' : one.old ? 'f2' : 'f1');
  const say = (one) => `${one.id} on ${one.device}: ${one.phase}, ${one.old ? 'older version' : 'this version'}`;
  if (!each.length) return html`<span class="soft">none loaded</span>`;
  return html`<span class="squares" role="img" aria-label=${each.slice(0, 40).map(say).join('; ')}>${each.slice(0, 40).map((one) => html`<i class=${look(one)} title=${say(one)}></i>`)}${each.length > 40 && ` and ${each.length - 40} more`}</span>`;
}

function AppPage({ name }) {
  const { data, error, reload } = useLoaded(async (signal) => {
    const [apps, past] = await Promise.all([api('GET', '/v1/apps', undefined, { signal }), api('GET', `/v1/apps/${encodeURIComponent(name)}/history`, undefined, { signal })]);
    return { app: apps.find((one) => one.app === name), past };
  }, [name], 1000);
  const back = useAction(async (version) => { const told = await api('POST', `/v1/apps/${encodeURIComponent(name)}/rollback`, version ? { version } : {}); reload(); return told; });
  if (!data?.app) return html`<${Head} title=${name} /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const { app, past } = data;
  return html`<${Head} title=${name}><span class=${`tag ${KIND[app.state]}`}>${app.state}</span>${app.version > 0 && html`<button disabled=${back.busy} onClick=${() => back.run()}>Roll back</button>`}<//>
    <${Oops} error=${error} retry=${reload} /><${Oops} error=${back.error} />${back.done && html`<div class="note good" role="status"><p>Version ${back.done.version || 'of the file'} is served from now on.</p></div>`}
    ${app.failed && html`<div class="note bad"><p><strong>The last version was taken back.</strong></p><pre>${app.failed}</pre></div>`}
    <div class="grid"><section class="card"><h2>Rollout <span class="soft">version ${app.version || 'of the file'}</span></h2><${Table} label="Rollout by function" rows=${app.functions} empty="It has no functions." columns=${[['function', (one) => html`<a href=${to('functions', one.name)}>${one.name}</a>`], ['instances', (one) => (one.min === one.max ? one.min : `${one.min} to ${one.max}`), 'nowrap'], ['one by one', (one) => html`<${Instances} each=${one.each} />`], ['ready', (one) => num(one.ready), 'n'], ['queue', (one) => num(one.queue), 'n']]} />
      <ul class="legend small"><li><span class="swatch f1"></span>ready</li><li><span class="swatch warming"></span>loading</li><li><span class="swatch f2"></span>of an older version</li><li><span class="swatch f7"></span>draining</li></ul>
      <${Facts} of=${[app.workflows.length > 0 && ['workflows', app.workflows.map((flow, at) => html`${at > 0 && ', '}<a href=${to('functions', flow)}>${flow}</a>`)], app.triggers.length > 0 && ['triggers', app.triggers.join(', ')]]} /></section>
    <section class="card"><h2>Versions</h2><${Table} label="Versions" rows=${past} empty="Only the file that the server was started with." columns=${[['version', (one) => one.number], ['', (one) => (one.current ? html`<span class="tag good">served</span>` : html`<button onClick=${() => back.run(one.number)} disabled=${back.busy} aria-label=${`Serve version ${one.number}`} class="nowrap">Serve it</button>`)], ['deployed', (one) => when(one.at_us)], ['by', (one) => one.by || 'local'], ['file', (one) => one.entry], ['SHA-256', (one) => html`<code title=${one.sha256}>${one.sha256.slice(0, 10)}</code>`]]} /></section></div>
    <p></p><${Traffic} name=${name} past=${past} current=${app.version} /><section class="card"><h2>Deploy a new version</h2><${Deploy} app=${name} done=${reload} /></section>
    <section class="card"><h2>Logs</h2><${Logs} functions=${app.functions.map((one) => one.name)} /></section>`;
}

function Traffic({ name, past, current }) {
  const where = `/v1/apps/${encodeURIComponent(name)}/traffic`;
  const { data, error, reload } = useLoaded((signal) => api('GET', where, undefined, { signal }), [name], 2000);
  const [weights, setWeights] = useState(null);
  const save = useAction(async (given) => { await api('PUT', where, given); setWeights(null); reload(); return true; });
  if (!data) return error && error.status !== 404 ? html`<${Oops} error=${error} />` : null;
  const now = weights || data.weights, counts = data.counts || {}, undone = data.rolled_back || {};
  const versions = [...new Set([...Object.keys(data.weights), ...past.slice(0, 5).map((one) => String(one.number)), String(current)])];
  const sum = Object.values(now).reduce((total, value) => total + Number(value), 0);
  const body = () => ({ weights: Object.fromEntries(Object.entries(now).map(([version, value]) => [version, Number(value)]).filter(([, value]) => value > 0)), ...(data.rollback_if && { rollback_if: data.rollback_if }), ...(data.shadow && { shadow: data.shadow }), ...(data.headers?.length && { headers: data.headers }) });
  return html`<section class="card"><h2>Canary <span class="soft">share of calls by version; ${{ whole: 'one version has them all', divided: 'divided between versions', loading: 'the versions are being loaded' }[data.state] || data.state}</span></h2>
    <${Table} label="Traffic by version" rows=${versions} columns=${[['version', (one) => (one === '0' ? 'of the file' : one)], ['percent of calls', (one) => html`<input type="number" min="0" max="100" step="any" aria-label=${`Percent of calls for version ${one}`} value=${now[one] ?? 0} onInput=${(event) => setWeights({ ...now, [one]: event.target.value })} />`], ['calls', (one) => num(counts[one]?.offered), 'n'], ['in time', (one) => (counts[one]?.offered ? html`<${Meter} part=${counts[one].in_time / counts[one].offered} />` : '–')], ['late', (one) => num(counts[one]?.late), 'n'], ['refused', (one) => num(counts[one]?.refused), 'n'], ['failed', (one) => num(counts[one]?.failed), 'n'], ['', (one) => (undone[one] ? html`<span class="bad-text">taken back: ${undone[one]}</span>` : one === data.stable ? html`<span class="tag good">stable</span>` : '')]]} />
    <${Facts} of=${[data.shadow && ['shadow, whose answers are thrown away', `version ${data.shadow}`], data.headers?.length > 0 && ['by header', data.headers.map((rule) => `${rule.name}: ${rule.value} to version ${rule.version}`).join('; ')], data.rollback_if && ['taken back if', Object.entries(data.rollback_if).map(([field, value]) => `${field.replaceAll('_', ' ')} ${value}`).join(', ')]]} />
    <${Oops} error=${save.error} /><p class="row"><button class="main" disabled=${save.busy || !weights || Math.abs(sum - 100) > 0.01} onClick=${() => save.run(body())}>Set weights</button>${weights && html`<span class=${Math.abs(sum - 100) > 0.01 ? 'bad-text' : 'soft'}>${num(sum, 1)} of 100 percent</span><button onClick=${() => setWeights(null)}>As it is</button>`}${save.done && !weights && html`<span class="good-text" role="status">The weights are set.</span>`}</p></section>`;
}

function Logs({ functions }) {
  const [name, setName] = useState(''), [shown, setShown] = useState([]), [error, setError] = useState(null);
  const box = useRef();
  useEffect(() => {
    const control = new AbortController();
    setShown([]);
    setError(null);
    (async () => {
      try {
        const response = await request('GET', `/v1/logs?tail=200&follow=1${name ? `&function=${encodeURIComponent(name)}` : ''}`, { signal: control.signal });
        if (!response.ok) throw await failure(response);
        let seen = [], due = 0;
        for await (const line of lines(response)) {
          if (line) seen = [...seen, JSON.parse(line)].slice(-500);
          if (!due) due = setTimeout(() => { due = 0; setShown(seen); }, 100);
        }
      } catch (problem) { if (!control.signal.aborted) setError(problem); }
    })();
    return () => control.abort();
  }, [name]);
  const mine = new Set(functions), kept = shown.filter((line) => mine.has(line.function));
  useEffect(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; }, [kept.length]);
  return html`<p><label class="inline"><span>Function</span><select value=${name} onChange=${(event) => setName(event.target.value)}><${Options} value=${name} of=${[['', 'all'], ...functions]} /></select></label></p><${Oops} error=${error} />
    ${kept.length ? html`<pre class="log" ref=${box} tabindex="0" aria-label="Logs">${kept.map((line) => html`<div><span class="soft">${new Date(line.at * 1000).toLocaleTimeString('en-GB')}</span> <b>${line.instance}</b> ${line.text}</div>`)}</pre>` : html`<${Empty}>Its functions have printed nothing yet. What they print comes here, live.<//>`}`;
}
