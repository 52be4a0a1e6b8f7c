// A form made from the inputs of a target, the request it makes, and its answer as a person would like to see it.
import { html, useState, useEffect } from './vendor/preact.js';
import { Facts, failure, ms, request, visible } from './lib.js';

export function InputFields({ inputs, values, setValues }) {
  const set = (name, value) => setValues({ ...values, [name]: value });
  return html`${inputs.map((input) => {
    const { name, type, required } = input, value = values[name], label = html`<span>${name}${type ? `, ${type}` : ''}${required ? '' : ', optional'}</span>`;
    if (type === 'boolean') return html`<label class="inline"><input type="checkbox" checked=${value === true} onChange=${(event) => set(name, event.target.checked)} /><span>${name}</span></label>`;
    if (type === 'number' || type === 'integer') return html`<label>${label}<input type="number" step=${type === 'integer' ? 1 : 'any'} value=${value ?? ''} onInput=${(event) => set(name, event.target.value)} /></label>`;
    return html`<div><label>${label}<textarea spellcheck=${false} placeholder=${type === 'string' ? 'text' : type === 'array' ? '[1, 2, 3]' : 'JSON, or text'} value=${value instanceof File ? '' : value ?? ''} disabled=${value instanceof File} onInput=${(event) => set(name, event.target.value)}></textarea></label>
      ${(!type || type === 'string') && html`<label class="small"><span>or a file for ${name}: a picture, sound, anything</span><input type="file" onChange=${(event) => set(name, event.target.files[0])} /></label><${Preview} file=${value} />`}</div>`;
  })}${!inputs.length && html`<p class="soft">It takes no input.</p>`}`;
}

function Preview({ file }) {
  const [url, setUrl] = useState('');
  useEffect(() => { if (!(file instanceof File)) { setUrl(''); return undefined; } const made = URL.createObjectURL(file); setUrl(made); return () => URL.revokeObjectURL(made); }, [file]);
  if (!url) return null;
  return file.type.startsWith('image/') ? html`<img class="result" src=${url} alt=${`Preview of ${file.name}`} />` : file.type.startsWith('audio/') ? html`<audio controls src=${url} aria-label=${`Preview of ${file.name}`}></audio>` : null;
}

const read = (input, text) => {
  if (input.type === 'string') return text;
  try { return JSON.parse(text); } catch { return text; }
};

/** Body and content type of a call with these values. */
export function encode(inputs, values) {
  const given = inputs.filter(({ name }) => values[name] !== undefined && values[name] !== '');
  if (given.some(({ name }) => values[name] instanceof File)) {
    const form = new FormData();
    for (const { name } of given) form.append(name, values[name] instanceof File ? values[name] : String(values[name]));
    return { body: form, headers: {} };
  }
  const plain = Object.fromEntries(given.map((input) => [input.name, typeof values[input.name] === 'string' ? read(input, values[input.name]) : values[input.name]]));
  const body = inputs.length === 1 ? (inputs[0].name in plain ? JSON.stringify(plain[inputs[0].name]) : '') : JSON.stringify(plain);
  return { body, headers: { 'content-type': 'application/json' } };
}

const SIGNS = [[[0x89, 0x50, 0x4e, 0x47], 'image/png'], [[0xff, 0xd8, 0xff], 'image/jpeg'], [[0x47, 0x49, 0x46, 0x38], 'image/gif'], [[0x52, 0x49, 0x46, 0x46], 'audio/wav'], [[0x4f, 0x67, 0x67, 0x53], 'audio/ogg'], [[0x49, 0x44, 0x33], 'audio/mpeg'], [[0x66, 0x4c, 0x61, 0x43], 'audio/flac']];

/** The answer of a call: text, a picture or sound, and what its headers say. */
export async function readAnswer(response) {
  if (!response.ok) throw await failure(response);
  const headers = Object.fromEntries([...response.headers].filter(([name]) => name.startsWith('lamina-')));
  const kind = (response.headers.get('content-type') || '').split(';')[0];
  const blob = await response.blob();
  if (kind === 'application/json') {
    const text = visible(await blob.text());
    try { return { headers, text: JSON.stringify(JSON.parse(text), null, 1) }; } catch { return { headers, text }; }
  }
  const head = new Uint8Array(await blob.slice(0, 12).arrayBuffer());
  const media = SIGNS.find(([sign]) => sign.every((byte, at) => head[at] === byte))?.[1];
  if (media) return { headers, media, url: URL.createObjectURL(new Blob([blob], { type: media })), size: blob.size };
  const text = visible(await blob.slice(0, 20000).text());
  return { headers, text: /\ufffd/.test(text) ? `${blob.size} bytes` : text };
}

export function Answer({ answer }) {
  const { headers } = answer;
  return html`<div role="status">${answer.url ? (answer.media.startsWith('image/') ? html`<img class="result" src=${answer.url} alt="The result" />` : html`<audio controls autoplay src=${answer.url} aria-label="The result"></audio>`) : html`<pre>${answer.text.slice(0, 100000)}</pre>`}
    <${Facts} of=${[['took', ms(Number(headers['lamina-latency-ms']))], ['queued', ms(Number(headers['lamina-queue-ms']))], ['batch', headers['lamina-batch']], ['slice', headers['lamina-slice']], ['cost', headers['lamina-cost']], headers['lamina-call-id'] && ['call', html`<a class="mono" href=${`/console/calls/${headers['lamina-call-id']}`}>${headers['lamina-call-id'].slice(0, 12)}</a>`]].filter((one) => one && one[1] !== undefined)} /></div>`;
}

/** Lines of a stream as they come. */
export async function* lines(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) { if (rest) yield rest; return; }
    const parts = (rest + visible(decoder.decode(value, { stream: true }))).split('\n');
    rest = parts.pop();
    yield* parts;
  }
}
export { request };
