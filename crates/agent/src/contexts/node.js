// The loop of a Node context: requests on descriptor 3, replies on descriptor 4, cells in the global realm through the
// inspector's REPL mode. Node's event loop goes on between cells, so timers and servers of earlier cells live.
const fs = require('node:fs');
const net = require('node:net');
const path = require('node:path');
const vm = require('node:vm');
const inspector = require('node:inspector');
const { promiseHooks } = require('node:v8');
const { Writable } = require('node:stream');
const { Worker } = require('node:worker_threads');

const MAX_PACKET = 60000;
const MAX_DISPLAYS = 64;
const MAX_TRACE_LINES = 200;
const MAX_TRACE = 64 * 1024;

// What the driver needs while cells do what they like to the global object.
const { setImmediate } = globalThis;
const pause = new Int32Array(new SharedArrayBuffer(4));

/** Writes all of it, even if a cell made the descriptor non-blocking. */
function writeFully(fd, bytes) {
  for (let at = 0; at < bytes.length; ) {
    try {
      at += fs.writeSync(fd, bytes, at);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(pause, 0, 0, 1);
    }
  }
}

// --- What an interrupt must not tear

let depth = 0;
let postponed = false;

/** Runs `work`, which does not take long, to its end; an interrupt takes effect afterwards. */
function uninterrupted(work) {
  depth++;
  try {
    return work();
  } finally {
    depth--;
    if (postponed && !depth) {
      postponed = false;
      interrupt();
    }
  }
}

// --- Replies

let token;

function send(kind, payload) {
  const body = Buffer.from(stringify(payload));
  const room = MAX_PACKET - token.length - 1;
  let at = 0;
  try {
    for (; body.length - at > room; at += room) {
      writeFully(4, Buffer.concat([token, Buffer.from('p'), body.subarray(at, at + room)]));
    }
    writeFully(4, Buffer.concat([token, Buffer.from(kind), body.subarray(at)]));
  } catch {
    // The agent has closed the channel.
    process.reallyExit(70);
  }
}

// --- Standard output and error: written at once, so that they keep their order with each other and with children's

class Output extends Writable {
  constructor(fd) {
    super({ decodeStrings: true });
    this.fd = fd;
    this._type = 'pipe';
    this.on('error', () => {});
  }
  // An interrupt in the middle would leave the stream waiting for ever for the end of this write.
  write(...rest) {
    return uninterrupted(() => super.write(...rest));
  }
  _write(chunk, encoding, done) {
    try {
      writeFully(this.fd, chunk);
      done();
    } catch (error) {
      done(error);
    }
  }
  // Like Node's own, these streams do not end before the process does.
  end(chunk, encoding, done) {
    const callback = [chunk, encoding, done].find((each) => typeof each === 'function');
    if (chunk !== undefined && chunk !== null && chunk !== callback) this.write(chunk, typeof encoding === 'string' ? encoding : undefined);
    if (callback) process.nextTick(callback);
    return this;
  }
  _destroy(error, done) {
    done(error);
    this._undestroy();
  }
}

function identity(fd) {
  try {
    const { dev, ino } = fs.fstatSync(fd);
    return `${dev}:${ino}`;
  } catch {
    return '';
  }
}

const outputs = [1, 2].map((fd) => {
  const stream = new Output(fd);
  const name = fd === 1 ? 'stdout' : 'stderr';
  Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => stream, set() {} });
  let spare = -1;
  try {
    spare = fs.openSync(`/proc/self/fd/${fd}`, fs.constants.O_WRONLY);
  } catch {
    // Not ours to open again: the descriptor cannot be brought back if a cell closes it.
  }
  return { fd, name, spare, identity: identity(fd) };
});

/** Brings back the descriptors 1 and 2 if a cell closed or replaced them. */
function restoreOutputs() {
  for (const { fd, name, spare, identity: wanted } of outputs) {
    if (identity(fd) === wanted) continue;
    try {
      fs.closeSync(fd);
    } catch {
      // It was closed already.
    }
    let got = -1;
    try {
      // The lowest free number is given out, and that is this one.
      got = fs.openSync(`/proc/self/fd/${spare}`, fs.constants.O_WRONLY);
    } catch {
      // Reported below.
    }
    if (got === fd) continue;
    fs.writeSync(fd === 1 ? 2 : 1, `the cell closed its standard ${name === 'stdout' ? 'output' : 'error'}, which cannot be opened again here\n`);
    process.reallyExit(70);
  }
}

// --- Errors

const INTERNAL_FRAME = /^\s+(at .*(driver:\d+:\d+|node:[a-z_/]+(:\d+)*)\)?|\.\.\. \d+ lines matching cause stack trace \.\.\.)( \{)?$/;

function cleanTrace(text) {
  const lines = [];
  let size = 0;
  for (const line of text.split('\n')) {
    const internal = INTERNAL_FRAME.exec(line);
    if (internal) {
      // The last frame opens the list of the error's properties.
      if (internal[4] && lines.length) lines.push(lines.pop() + internal[4]);
      continue;
    }
    size += Buffer.byteLength(line) + 1;
    if (lines.length >= MAX_TRACE_LINES || size > MAX_TRACE) {
      lines.push('...');
      break;
    }
    lines.push(line);
  }
  return lines;
}

function shown(error) {
  try {
    return util.inspect(error, { ...INSPECT, depth: 2 });
  } catch {
    return 'an error that cannot be shown';
  }
}

function property(error, name) {
  try {
    const value = error[name];
    return typeof value === 'string' ? value : undefined;
  } catch {
    return undefined;
  }
}

function errorReply(error, place) {
  if (!util.types.isNativeError(error) && !(error instanceof Error)) {
    const text = cutText(shown(error), MAX_TRACE / 2);
    return { name: 'Uncaught', value: text, traceback: cleanTrace(`Uncaught ${text}`) };
  }
  const name = property(error, 'name') || 'Error';
  const value = cutText(property(error, 'message') ?? '', MAX_TRACE / 2);
  if (error instanceof SourceError) return { name, value, traceback: [...error.lines, `${name}: ${value}`] };
  const traceback = cleanTrace(cutText(shown(error), 4 * MAX_TRACE));
  return { name, value, traceback: place ? [...place, ...traceback] : traceback };
}

function tellUnhandled(error) {
  const text = `Uncaught ${cleanTrace(shown(error)).join('\n')}\n`;
  try {
    writeFully(2, Buffer.from(text));
  } catch {
    // Standard error stays closed until the cell ends.
  }
}

// --- What cells find

function builtin(name, value) {
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
}

function here() {
  try {
    return process.cwd();
  } catch {
    return '/';
  }
}

let required = { folder: undefined, require: undefined };
/** `require` as in a file of the current directory. */
function localRequire() {
  const folder = here();
  if (required.folder !== folder) required = { folder, require: nodeModule.createRequire(path.join(folder, 'cell.js')) };
  return required.require;
}
const cellRequire = Object.assign((id) => localRequire()(id), {
  resolve: (...rest) => localRequire().resolve(...rest),
  cache: require.cache,
  extensions: require.extensions,
  main: undefined,
});

const loader = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
// Compiled apart, because only then it resolves names from the directory that is current when it is called.
const importHere = loader && vm.compileFunction('return import(id, options)', ['id', 'options'], { importModuleDynamically: loader });
const cellImport = importHere ?? (async (id) => {
  const found = localRequire().resolve(id);
  return import(path.isAbsolute(found) ? require('node:url').pathToFileURL(found).href : found);
});
const importMeta = {
  get url() { return require('node:url').pathToFileURL(path.join(here(), 'cell.js')).href; },
  get dirname() { return here(); },
  get filename() { return path.join(here(), 'cell.js'); },
  resolve: (id) => require('node:url').pathToFileURL(localRequire().resolve(id)).href,
};

function show(bundle) {
  if (!cell) {
    process.stdout.write(`${bundle.data['text/plain'] ?? `[${Object.keys(bundle.data).join(', ')} shown while no cell ran]`}\n`);
    return;
  }
  cell.displays++;
  if (cell.displays <= MAX_DISPLAYS) send('d', bundle);
  else if (cell.displays === MAX_DISPLAYS + 1) {
    send('d', { data: { 'text/plain': `more than ${MAX_DISPLAYS} displays in one cell: the rest is left out` }, metadata: {} });
  }
}
const display = (value, metadata) => show(isBundle(value) ? bundleOf(value, metadata) : describe(value));
for (const [name, mime] of Object.entries({
  html: 'text/html', markdown: 'text/markdown', latex: 'text/latex', text: 'text/plain', json: 'application/json',
  svg: 'image/svg+xml', png: 'image/png', jpeg: 'image/jpeg',
})) {
  display[name] = (value, metadata) => show(bundleOf({ [mime]: value }, metadata));
}

builtin('require', cellRequire);
builtin('display', display);
builtin(IMPORT, cellImport);
builtin(IMPORT_META, importMeta);
builtin(VALUE, (value) => {
  if (cell) cell.value = value;
});

// --- Cells

const session = new inspector.Session();
session.connect();
let count = 0;
let cell = null;
// The promises of interrupted cells, which may stay pending for ever: the inspector, which still waits for them, crashes Node
// when one is collected.
const abandoned = [];

/** Hands a value of the inspector's to the driver itself: what `holder` was given is the very object. */
const holder = { value: undefined };
const handle = (() => {
  const key = '__holder';
  builtin(key, holder);
  let id;
  session.post('Runtime.evaluate', { expression: key }, (error, reply) => { id = reply.result.objectId; });
  delete globalThis[key];
  return id;
})();
function valueOf(remote) {
  if (remote.type === 'undefined') return undefined;
  if (!remote.objectId && remote.unserializableValue === undefined) return remote.value ?? null;
  const { objectId, unserializableValue } = remote;
  session.post('Runtime.callFunctionOn', {
    objectId: handle,
    functionDeclaration: 'function (value) { this.value = value; }',
    arguments: [objectId ? { objectId } : { unserializableValue }],
    silent: true,
  });
  const { value } = holder;
  holder.value = undefined;
  return value;
}

function changeEnvironment(pairs) {
  const before = pairs.map(([name]) => [name, process.env[name]]);
  for (const [name, value] of pairs) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  return before;
}

function begin([code, cwd, flags, ...env]) {
  count++;
  cell = { count, displays: 0, code, undo: [] };
  const mine = cell;
  try {
    const environment = changeEnvironment(env.map((each) => {
      const at = each.indexOf('=');
      return [each.slice(0, at), each.slice(at + 1)];
    }));
    mine.undo.push(() => changeEnvironment(environment.reverse()));
    if (cwd) {
      const before = here();
      process.chdir(cwd);
      mine.undo.push(() => process.chdir(before));
    }
    if (flags.split(' ').includes('typescript')) mine.code = withoutTypes(mine.code);
    mine.code = prepare(mine.code);
  } catch (error) {
    return finish(mine, errorReply(error));
  }
  const expression = `${mine.code}\n//# sourceURL=cell-${mine.count}`;
  const options = { expression, replMode: true, objectGroup: 'cell', silent: true };
  const stop = promiseHooks.onInit((promise) => { mine.promise ??= promise; });
  session.post('Runtime.evaluate', options, (error, reply) => evaluated(mine, error, reply));
  stop();
}

function evaluated(mine, error, reply) {
  // An interrupted cell may have been answered for already.
  if (cell !== mine) return;
  try {
    if (error) throw mine.interrupted ? new SourceError('Interrupted', INTERRUPTED) : error;
    const value = valueOf(reply.result);
    if (reply.exceptionDetails) return failed(mine, value, placeOf(mine, value, reply.exceptionDetails));
    const last = 'value' in mine ? mine.value : value;
    if (last !== undefined) send('r', describe(last));
  } catch (problem) {
    return failed(mine, problem);
  }
  // By then Node has reported promises that the cell left rejected.
  setImmediate(() => finish(mine));
}

function failed(mine, problem, place) {
  const reply = errorReply(problem, place);
  setImmediate(() => finish(mine, reply));
}

/** Where code could not even be compiled, which the stack of a SyntaxError does not tell. */
function placeOf(mine, error, { lineNumber, columnNumber }) {
  if (!util.types.isNativeError(error) || error.name !== 'SyntaxError') return undefined;
  if (String(error.stack).includes(`cell-${mine.count}:`) || !(lineNumber >= 0)) return undefined;
  return [`cell-${mine.count}:${lineNumber + 1}`, ...pointer(mine.code, lineNumber + 1, columnNumber)];
}

function finish(mine, error) {
  if (cell !== mine) return;
  for (const undo of mine.undo.reverse()) {
    try {
      undo();
    } catch {
      // The previous directory was removed, so it stays in the current one.
    }
  }
  restoreOutputs();
  watch();
  session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
  if (error) send('e', error);
  cell = null;
  send('f', { status: error ? 'error' : 'ok', count: mine.count });
  next();
}

// --- Interrupts

// A busy loop keeps this thread from noticing a signal, so another thread waits for it and asks the inspector to look in
// here. What to do is decided here, on the thread of the cells: nothing is stopped when no cell runs.
const INTERRUPTED = 'the cell was interrupted';
const INTERRUPT = Symbol.for('interrupt the cell');
const WATCHER = `
const { Session } = require('node:inspector');
const { Signal } = require('internal/test/binding').internalBinding('signal_wrap');
const signal = new Signal();
signal.onsignal = () => {
  // Connected for this only: Node does not exit while a session is.
  const session = new Session();
  session.connectToMainThread();
  session.post('Runtime.evaluate', { expression: "globalThis[Symbol.for('interrupt the cell')]()" }, () => session.disconnect());
};
signal.start(2);
setInterval(() => {}, 2 ** 30);
require('node:worker_threads').parentPort.postMessage('watching');
`;
function interrupt() {
  const mine = cell;
  if (!mine) return;
  if (depth) {
    postponed = true;
    return;
  }
  mine.interrupted = true;
  abandoned.push(mine.promise);
  setImmediate(() => finish(mine, errorReply(new SourceError('Interrupted', INTERRUPTED))));
  session.post('Runtime.terminateExecution');
}
Object.defineProperty(globalThis, INTERRUPT, { value: interrupt });
const ignore = () => {};
// Node has signals for its main thread only; the class behind them, which works in any, is internal.
const watcher = new Worker(WATCHER, {
  eval: true, execArgv: ['--expose-internals', '--no-warnings'], stdout: true, stderr: true, resourceLimits: { maxOldGenerationSizeMb: 32 },
});
watcher.unref();
// No cell runs before it can be interrupted; if the thread cannot be had, the agent's last resort remains.
let watching = false;
for (const event of ['message', 'error', 'exit']) {
  watcher.once(event, () => {
    watching = true;
    next();
  });
}

/** Puts back the listeners without which a signal or an error would end the process. */
function watch() {
  for (const [event, listener] of [['SIGINT', ignore], ['uncaughtException', tellUnhandled], ['unhandledRejection', tellUnhandled]]) {
    if (!process.listeners(event).includes(listener)) process.on(event, listener);
  }
}

// --- Requests

const waiting = [];
let parts = [];
let held = 0;

function next() {
  if (cell || !watching || !waiting.length) return;
  const request = waiting.shift();
  // Apart from the reading of requests, which an interrupt must not tear.
  setImmediate(() => begin(request));
}

function receive(chunk) {
  parts.push(chunk);
  held += chunk.length;
  while (held >= 4) {
    if (parts[0].length < 4) parts = [Buffer.concat(parts)];
    const length = parts[0].readUInt32LE(0);
    if (held < 4 + length) return;
    const all = Buffer.concat(parts);
    held -= 4 + length;
    parts = held ? [all.subarray(4 + length)] : [];
    answer(fieldsOf(all.subarray(4, 4 + length)));
  }
}

function fieldsOf(body) {
  const fields = [];
  for (let at = 0; at + 4 <= body.length; ) {
    const length = body.readUInt32LE(at);
    fields.push(body.toString('utf8', at + 4, at + 4 + length));
    at += 4 + length;
  }
  return fields;
}

function answer([kind, ...fields]) {
  if (kind === 'hello') {
    token = Buffer.from(fields[0]);
    send('y', { version: process.versions.node });
    setImmediate(acorn);
  } else if (kind === 'execute') {
    waiting.push(fields);
    next();
  }
}

watch();
const requests = new net.Socket({ fd: 3, readable: true, writable: false });
requests.on('data', receive);
requests.on('close', () => process.reallyExit(0));
requests.on('error', () => process.reallyExit(70));
//# sourceURL=driver
