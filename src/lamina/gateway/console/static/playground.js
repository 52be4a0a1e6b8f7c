// Playground: call any function from its inputs; chat with one that takes messages.
import { html, useState, useRef } from './vendor/preact.js';
import { Empty, Head, Oops, Options, Problem, Segments, api, failure, go, ms, request, to, useAction, useLoaded } from './lib.js';
import { Answer, InputFields, encode, lines, readAnswer } from './forms.js';

/** The input that a chat goes into: all messages so far, or the last one as text. */
const chatInput = (target) => target.inputs.find((one) => one.name === 'messages') || target.inputs.find((one) => one.name === 'prompt');
const canChat = (target) => target.kind === 'function' && chatInput(target) && target.inputs.every((one) => one === chatInput(target) || !one.required);

export function Playground({ parts }) {
  const { data, error, reload } = useLoaded(async (signal) => (await Promise.all(['functions', 'workflows'].map((kind) => api('GET', `/calls/v1/${kind}`, undefined, { signal })))).flat(), []);
  const [search, setSearch] = useState('');
  if (!data) return html`<${Head} title="Playground" /><${Oops} error=${error} retry=${reload} />${!error && html`<p class="soft">Loading.</p>`}`;
  const isChat = parts[0] === 'chat' && parts[1] !== undefined, name = isChat ? parts[1] : parts[0];
  const chosen = data.find((one) => one.name === name), found = data.filter((one) => one.name.includes(search));
  const shown = chosen && !found.slice(0, 200).includes(chosen) ? [chosen, ...found.slice(0, 199)] : found.slice(0, 200);
  return html`<${Head} title="Playground" about="Call a function or workflow as a client would. Calls made here count, cost and show up under Calls like any other.">
      ${data.length > 12 && html`<label class="inline"><span>Search</span><input type="search" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>`}
      <label class="inline"><span>Call</span><select value=${chosen?.name || ''} onChange=${(event) => go(to('playground', event.target.value).slice('/console'.length))}><${Options} value=${chosen?.name || ''} of=${[['', found.length > 200 ? `choose; 200 of ${found.length} are listed` : 'choose a function or workflow'], ...shown.map((one) => [one.name, `${one.name.slice(0, 60)} (${one.kind})`])]} /></select></label><//>
    <${Oops} error=${error} />
    ${!data.length && html`<${Empty}>Nothing is deployed. Deploy an app under Apps, or start the server with one.<//>`}
    ${chosen && canChat(chosen) && html`<p><${Segments} label="How to call it" value=${isChat ? 'chat' : 'form'} options=${[['form', 'Form'], ['chat', 'Chat']]} onChange=${(how) => go((how === 'chat' ? to('playground', 'chat', chosen.name) : to('playground', chosen.name)).slice('/console'.length))} /></p>`}
    ${chosen ? (isChat && canChat(chosen) ? html`<${Chat} key=${chosen.name} target=${chosen} />` : html`<${Caller} key=${chosen.name} target=${chosen} />`) : name ? html`<${Empty}>No function or workflow is called ${name.slice(0, 120)}.<//>` : data.length > 0 && html`<${Empty}>Choose what to call. Its form has a field for every input; a picture or sound is uploaded as it is. A function with an input called messages or prompt can be chatted with.<//>`}`;
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

/** Text of one piece of an answer: a string, or the delta of a chat completion. */
function textOf(piece) {
  if (typeof piece === 'string') return piece;
  return piece?.choices?.[0]?.delta?.content ?? piece?.choices?.[0]?.message?.content ?? piece?.content ?? piece?.text ?? JSON.stringify(piece);
}

function Chat({ target }) {
  const [said, setSaid] = useState([]), [text, setText] = useState(''), control = useRef(null), input = chatInput(target);
  const send = useAction(async () => {
    const before = [...said.filter((one) => one.content), { role: 'user', content: text }];
    setSaid([...before, { role: 'assistant', content: '' }]);
    setText('');
    control.current = new AbortController();
    const body = JSON.stringify({ [input.name]: input.name === 'messages' ? before : text });
    const response = await request('POST', `/calls/v1/functions/${target.name}`, { body, headers: { 'content-type': 'application/json', accept: 'text/event-stream' }, signal: control.current.signal });
    if (!response.ok) throw await failure(response);
    let answer = '', event = '';
    for await (const line of lines(response)) {
      if (line.startsWith('event: ')) event = line.slice(7);
      else if (!line) event = '';
      else if (line.startsWith('data: ') && event === 'error') throw new Problem(500, JSON.parse(line.slice(6)));
      else if (line.startsWith('data: ') && event !== 'end') { answer += textOf(JSON.parse(line.slice(6))); setSaid([...before, { role: 'assistant', content: answer }]); }
    }
    return true;
  });
  const ends = send.error?.name === 'AbortError' ? null : send.error;
  return html`<section class="card chat"><h2>${target.name}</h2><div aria-live="polite">${said.map((one) => html`<div class=${`bubble ${one.role}`}><strong class="small soft">${one.role}</strong><br />${one.content || '…'}</div>`)}${!said.length && html`<${Empty}>${target.doc || 'Say something.'}<//>`}</div><${Oops} error=${ends} />
    <form onSubmit=${(event) => { event.preventDefault(); if (text.trim() && !send.busy) send.run(); }}><label><span>Message, sent with Enter; Shift and Enter begin a new line</span><textarea value=${text} onKeyDown=${(event) => { if (event.key === 'Enter' && !event.shiftKey) { event.preventDefault(); event.target.form.requestSubmit(); } }} onInput=${(event) => setText(event.target.value)}></textarea></label><p class="row"><button class="main" disabled=${send.busy}>Send</button>${send.busy && html`<button type="button" onClick=${() => control.current?.abort()}>Stop</button>`}</p></form></section>`;
}
