// Playground: call any function from its inputs; chat with a model where the server has any.
import { html, useState, useRef } from './vendor/preact.js';
import { Empty, Head, Oops, Options, api, failure, go, ms, request, to, useAction, useLoaded } from './lib.js';
import { Answer, InputFields, encode, lines, readAnswer } from './forms.js';

export function Playground({ parts }) {
  const { data, error, reload } = useLoaded(async (signal) => (await Promise.all(['functions', 'workflows'].map((kind) => api('GET', `/calls/v1/${kind}`, undefined, { signal })))).flat(), []);
  const models = useLoaded((signal) => api('GET', '/calls/v1/models', undefined, { signal }).then((told) => told.data || [], () => []), []);
  const [search, setSearch] = useState('');
  if (!data) return html`<${Head} title="Playground" /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const chat = (models.data || []).filter((model) => model.object !== 'function' && !data.some((one) => one.name === model.id && one.inputs.length !== 1));
  const chosen = parts[0] === 'chat' && parts[1] ? null : data.find((one) => one.name === parts[0]);
  const found = data.filter((one) => one.name.includes(search)).slice(0, 200);
  return html`<${Head} title="Playground" about="Call a function or workflow as a client would. Calls made here count, cost and show up under Calls like any other.">
      ${data.length > 12 && html`<label class="inline"><span>Search</span><input type="search" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>`}
      <label class="inline"><span>Call</span><select value=${chosen?.name || ''} onChange=${(event) => go(to('playground', event.target.value).slice('/console'.length))}><${Options} value=${chosen?.name || ''} of=${[['', 'choose a function or workflow'], ...found.map((one) => [one.name, `${one.name} (${one.kind})`])]} /></select></label>
      ${chat.length > 0 && html`<label class="inline"><span>Chat</span><select value=${parts[0] === 'chat' ? parts[1] : ''} onChange=${(event) => go(to('playground', 'chat', event.target.value).slice('/console'.length))}><${Options} value=${parts[0] === 'chat' ? parts[1] : ''} of=${[['', 'choose a model'], ...chat.map((one) => one.id)]} /></select></label>`}<//>
    <${Oops} error=${error} />
    ${!data.length && html`<${Empty}>Nothing is deployed. Deploy an app under Apps, or start the server with one.<//>`}
    ${parts[0] === 'chat' && parts[1] ? html`<${Chat} key=${parts[1]} model=${parts[1]} />` : chosen ? html`<${Caller} key=${chosen.name} target=${chosen} />` : parts[0] ? html`<${Empty}>No function or workflow is called ${parts[0]}.<//>` : data.length > 0 && html`<${Empty}>Choose what to call. Its form has a field for every input; a picture or sound is uploaded as it is.<//>`}`;
}

function Caller({ target }) {
  const [values, setValues] = useState({}), [deadline, setDeadline] = useState(''), [streams, setStreams] = useState(false), [pieces, setPieces] = useState([]);
  const call = useAction(async () => {
    const given = encode(target.inputs, values);
    if (deadline) given.headers['lamina-deadline-ms'] = deadline;
    if (!streams) return readAnswer(await request('POST', `/calls/v1/${target.kind}s/${target.name}`, given));
    given.headers.accept = 'text/event-stream';
    const response = await request('POST', `/calls/v1/${target.kind}s/${target.name}`, given);
    if (!response.ok) throw await failure(response);
    const seen = [];
    let event = '';
    for await (const line of lines(response)) {
      if (line.startsWith('event: ')) event = line.slice(7);
      else if (line.startsWith('data: ') && event !== 'end') { seen.push((event === 'error' ? 'error: ' : '') + line.slice(6)); setPieces([...seen]); event = ''; }
    }
    return { headers: {}, text: seen.join('\n') };
  });
  return html`<div class="split"><section class="card"><h2>${target.name} <span class="soft">${target.kind}, SLO ${ms(target.slo_ms)}</span></h2>${target.doc && html`<p class="soft">${target.doc}</p>`}
      <form class="fields" onSubmit=${(event) => { event.preventDefault(); setPieces([]); call.run(); }}><${InputFields} inputs=${target.inputs} values=${values} setValues=${setValues} />
        <div class="row"><label><span>Deadline, ms (optional)</span><input type="number" min="0.1" step="any" value=${deadline} onInput=${(event) => setDeadline(event.target.value)} /></label><label class="inline"><input type="checkbox" checked=${streams} onChange=${(event) => setStreams(event.target.checked)} /><span>Show pieces as they come</span></label></div>
        <p class="row"><button class="main" disabled=${call.busy}>${call.busy ? 'Calling' : 'Call'}</button>${target.kind === 'workflow' && html`<a href=${to('runs', 'new', target.name)}>Start it as a durable run</a>`}</p></form></section>
    <section class="card"><h2>Answer</h2>${call.error && html`<${Oops} error=${call.error} />${call.error.body?.offer_ms && html`<p>It could be promised within ${ms(call.error.body.offer_ms)}.</p>`}${call.error.body?.id && call.error.status === 429 && html`<p><a href=${to('calls', call.error.body.id)}>Why it was refused</a></p>`}${call.error.body?.trace && html`<pre>${call.error.body.trace}</pre>`}`}
      ${call.busy && streams && pieces.length > 0 && html`<pre aria-live="polite">${pieces.join('\n')}</pre>`}
      ${call.done ? html`<${Answer} answer=${call.done} />` : !call.error && html`<${Empty}>${call.busy ? 'Waiting for the answer.' : 'The answer comes here, with the time it took, its batch and its slice.'}<//>`}</section></div>`;
}

function Chat({ model }) {
  const [said, setSaid] = useState([]), [text, setText] = useState(''), control = useRef(null);
  const send = useAction(async () => {
    const before = [...said, { role: 'user', content: text }];
    setSaid([...before, { role: 'assistant', content: '' }]);
    setText('');
    control.current = new AbortController();
    const response = await request('POST', '/calls/v1/chat/completions', { body: JSON.stringify({ model, messages: before, stream: true }), headers: { 'content-type': 'application/json' }, signal: control.current.signal });
    if (!response.ok) throw await failure(response);
    let answer = '';
    for await (const line of lines(response)) {
      if (!line.startsWith('data: ') || line === 'data: [DONE]') continue;
      answer += JSON.parse(line.slice(6)).choices?.[0]?.delta?.content || '';
      setSaid([...before, { role: 'assistant', content: answer }]);
    }
    return true;
  });
  return html`<section class="card"><h2>${model}</h2><div aria-live="polite">${said.map((one) => html`<div class=${`bubble ${one.role}`}><strong class="small soft">${one.role}</strong><br />${one.content || '…'}</div>`)}</div><${Oops} error=${send.error} />
    <form onSubmit=${(event) => { event.preventDefault(); if (text.trim()) send.run(); }}><label><span>Message</span><textarea value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label><p class="row"><button class="main" disabled=${send.busy}>Send</button>${send.busy && html`<button type="button" onClick=${() => control.current?.abort()}>Stop</button>`}</p></form></section>`;
}
