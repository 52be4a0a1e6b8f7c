// The console: navigation, signing in, and the view that the address names.
import { html, render, useState, useEffect, useErrorBoundary } from './vendor/preact.js';
import { BASE, Head, Oops, Segments, Empty, api, schemeName, setScheme, session, signIn, signOut, usePlace, useSession } from './lib.js';
import { connect, useLive } from './feed.js';
import { Devices } from './devices.js';
import { Functions } from './functions.js';
import { Calls, Refusals } from './calls.js';
import { Runs } from './runs.js';
import { Plan } from './plan.js';
import { Apps } from './apps.js';
import { Access } from './access.js';
import { Playground } from './playground.js';
import { Cluster } from './cluster.js';

const VIEWS = [['devices', 'Devices', Devices], ['functions', 'Functions', Functions], ['calls', 'Calls', Calls], ['refusals', 'Refusals', Refusals], ['runs', 'Runs', Runs], ['plan', 'Plan', Plan], ['apps', 'Apps', Apps], ['access', 'Access', Access], ['playground', 'Playground', Playground]];
const FEED = { live: ['good', 'Live'], connecting: ['warn', 'Connecting'], lost: ['bad', 'Lost; trying again'], forbidden: ['', 'No feed'], resting: ['', 'Resting'] };

function Feed() {
  const { state, pulse } = useLive();
  const [kind, text] = FEED[state];
  return html`<span class="live" role="status"><span class=${`dot ${kind}`}></span>${text}${state === 'live' && pulse && pulse.viewers > 1 ? `, ${pulse.viewers} viewers` : ''}</span>`;
}

function Scheme() {
  const [name, set] = useState(schemeName());
  return html`<${Segments} label="Colours" value=${name} options=${[['auto', 'Auto'], ['light', 'Light'], ['dark', 'Dark']]} onChange=${(next) => { setScheme(next); set(next); }} />`;
}

function Side({ current }) {
  const { caller } = useSession();
  const { pulse } = useLive();
  const badge = { devices: pulse?.devices.length, functions: pulse?.target_count, runs: pulse?.runs.running || null };
  const views = current === 'cluster' || pulse?.devices.some((device) => device.node) ? [...VIEWS, ['cluster', 'Cluster']] : VIEWS;
  return html`<header class="side"><a class="brand" href=${BASE}><img src="/console/icon.svg" alt="" />Lamina</a>
    <nav aria-label="Views">${views.map(([key, name]) => html`<a href=${`${BASE}/${key}`} aria-current=${key === current ? 'page' : undefined}>${name}${badge[key] ? html`<span class="badge">${badge[key]}</span>` : ''}</a>`)}</nav>
    <div class="foot"><${Feed} /><${Scheme} />
      ${caller && html`<span class="caller">${!caller.name || caller.name === 'local' ? 'Local operator' : caller.name}${caller.tenant ? `, tenant ${caller.tenant}` : ''}</span>`}
      ${session.hasToken() && html`<button onClick=${signOut}>Sign out</button>`}</div></header>`;
}

function SignIn() {
  const [kind, setKind] = useState('token'), [error, setError] = useState(null), [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    setBusy(true);
    setError(null);
    try {
      const token = kind === 'token' ? given.get('token') : (await api('POST', '/v1/auth/log-in', { name: given.get('name'), password: given.get('password') })).token;
      await signIn(token);
    } catch (problem) { setError(problem); }
    setBusy(false);
  };
  return html`<main class="view signin" id="view" tabindex="-1"><${Head} title="Sign in" about="This server asks for a token. It is kept in this page alone, and is gone when the page is closed." />
    <p><${Segments} label="Sign in with" value=${kind} options=${[['token', 'Token'], ['password', 'Name and password']]} onChange=${setKind} /></p>
    <${Oops} error=${error} />
    <form class="fields card" onSubmit=${submit} autocomplete="off">
      ${kind === 'token' ? html`<label><span>Token</span><input name="token" type="password" required autocomplete="off" spellcheck=${false} /></label><p class="soft small">lamina token create NAME --scope read makes one.</p>`
        : html`<label><span>Name</span><input name="name" required autocomplete="username" /></label><label><span>Password</span><input name="password" type="password" required autocomplete="current-password" /></label>`}
      <p><button class="main" disabled=${busy}>Sign in</button></p></form></main>`;
}

function View({ view, parts, query }) {
  const [error, reset] = useErrorBoundary();
  if (error) return html`<${Head} title="A defect of this page" /><${Oops} error=${error} retry=${reset} />`;
  return html`<${view} parts=${parts} query=${query} />`;
}

function App() {
  const { parts, query } = usePlace();
  const { needsToken, caller } = useSession();
  const [problem, setProblem] = useState(null);
  const current = parts[0] || 'devices';
  const found = VIEWS.find(([key]) => key === current) || (current === 'cluster' ? ['cluster', 'Cluster', Cluster] : null);
  useEffect(() => { if (!caller && !needsToken) api('GET', '/v1/whoami').then((who) => { session.caller = who; setProblem(null); }, (error) => { if (error.status !== 401) setProblem(error); }); }, [needsToken]);
  useEffect(() => { document.title = `${found ? found[1] : 'Not there'}${parts[1] ? ` ${parts[1]}` : ''} · Lamina`; }, [current, parts[1]]);
  if (needsToken) return html`<${SignIn} />`;
  return html`<a class="skip" href="#view" onClick=${(event) => { event.preventDefault(); document.getElementById('view').focus(); }}>Skip to the view</a>
    <div class="shell"><${Side} current=${current} />
    <main class="view" id="view" tabindex="-1" key=${current}>${problem && html`<${Oops} error=${problem} />`}
      ${found ? html`<${View} view=${found[2]} parts=${parts.slice(1)} query=${query} />` : html`<${Head} title="Not there" /><${Empty}>No view is called ${current}. <a href=${BASE}>Devices</a> is where to begin.<//>`}</main></div>`;
}

render(html`<${App} />`, document.getElementById('root').replaceChildren() || document.getElementById('root'));
connect();
