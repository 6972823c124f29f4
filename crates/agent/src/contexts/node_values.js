// Represents values as bounded Jupyter MIME bundles.
'use strict';
const util = require('node:util');

// Kept for the driver, whatever cells do to the global object.
const { stringify, parse: parseJson } = JSON;

const MAX_TEXT = 64 * 1024; // text/plain of a value
const MAX_VALUE = 8 * 1024 * 1024; // one MIME type
const MAX_BUNDLE = 16 * 1024 * 1024; // all MIME types of one value
const MAX_JSON = 64 * 1024; // the limit of JSON that a cell did not request
const MAX_JSON_NODES = 5000;
const MAX_JSON_DEPTH = 16;
const MAX_KEYS = 1000;
const INSPECT = { depth: 4, maxArrayLength: 100, maxStringLength: 8192, breakLength: 100 };

const MIME = /^[a-z]+\/[a-z0-9.+-]+$/;
const IMAGES = [
  ['image/png', Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a])],
  ['image/jpeg', Buffer.from([0xff, 0xd8, 0xff])],
];

/** Cuts text to so many bytes of UTF-8, never inside a character. */
function cutText(text, most) {
  // A UTF-16 unit is at most three bytes: what is certainly short enough need not be measured.
  if (text.length * 3 <= most) return text;
  const bytes = Buffer.from(text.slice(0, most));
  if (bytes.length <= most && text.length <= most) return text;
  let end = Math.min(most, bytes.length);
  while (end > 0 && end < bytes.length && (bytes[end] & 0xc0) === 0x80) end--;
  return bytes.toString('utf8', 0, end);
}

function inspect(value) {
  if (typeof value === 'string') {
    const shown = value.length > MAX_TEXT ? value.slice(0, MAX_TEXT) : value;
    return util.inspect(shown, { maxStringLength: Infinity, breakLength: Infinity });
  }
  if (value === null || typeof value !== 'object' || util.types.isProxy(value) || bytesOf(value)) return util.inspect(value, INSPECT);
  // Node bounds the elements that it shows, but not the properties.
  const keys = Array.isArray(value) ? [] : Object.keys(value);
  if (keys.length <= MAX_KEYS) return util.inspect(value, INSPECT);
  const part = Object.create(Object.getPrototypeOf(value));
  for (const key of keys.slice(0, MAX_KEYS)) Object.defineProperty(part, key, Object.getOwnPropertyDescriptor(value, key));
  return `${util.inspect(part, INSPECT)}\n... ${keys.length - MAX_KEYS} more properties`;
}

function bytesOf(value) {
  if (Buffer.isBuffer(value)) return value;
  if (value instanceof Uint8Array) return Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  if (value instanceof ArrayBuffer) return Buffer.from(value);
  return undefined;
}

function imageType(bytes) {
  const found = IMAGES.find(([, magic]) => bytes.subarray(0, magic.length).equals(magic));
  return found && found[0];
}

/**
 * A copy of plain data, or undefined if it is anything else: class instances, accessors, functions, cycles, or too much.
 */
function plainData(value) {
  let left = MAX_JSON_NODES;
  let size = MAX_JSON;
  const copy = (item, depth) => {
    if (--left < 0 || size < 0 || depth > MAX_JSON_DEPTH) throw plainData;
    if (item === null || typeof item === 'boolean') return item;
    if (typeof item === 'number' && Number.isFinite(item)) return item;
    if (typeof item === 'string') {
      size -= item.length;
      return item;
    }
    if (typeof item !== 'object' || util.types.isProxy(item)) throw plainData;
    if (Array.isArray(item)) {
      if (item.length > left) throw plainData;
      return Array.from(item, (each) => copy(each, depth + 1));
    }
    const prototype = Object.getPrototypeOf(item);
    if (prototype !== Object.prototype && prototype !== null) throw plainData;
    const result = Object.create(null);
    for (const key in item) {
      const property = Object.getOwnPropertyDescriptor(item, key);
      if (!property || !('value' in property)) throw plainData;
      size -= key.length;
      result[key] = copy(property.value, depth + 1);
    }
    return result;
  };
  try {
    return copy(value, 0);
  } catch (error) {
    if (error === plainData) return undefined;
    throw error;
  }
}

/** Whether a value is a bundle: an object whose every key is a MIME type. */
function isBundle(value) {
  if (value === null || typeof value !== 'object' || Array.isArray(value) || util.types.isProxy(value)) return false;
  const keys = Object.keys(value);
  return keys.length > 0 && keys.length <= 32 && keys.every((key) => MIME.test(key));
}

/** Puts one representation into a bundle as the contract wants it, or notes why not. */
function addTo(bundle, mime, value) {
  const omit = (bytes, reason) => bundle.omitted.push({ mime, bytes, reason });
  let content = value;
  const bytes = bytesOf(value);
  if (bytes) {
    content = /^image\/(?!svg)/.test(mime) || !/^(text\/|image\/|application\/(json|javascript))/.test(mime)
      ? null
      : bytes.toString();
    if (content === null) {
      if (bytes.length > (MAX_VALUE / 4) * 3) return omit(bytes.length, 'larger than 8 MiB');
      content = bytes.toString('base64');
    }
  }
  let size;
  if (mime === 'application/json') {
    const text = stringify(content);
    if (text === undefined) return omit(0, 'not JSON');
    size = Buffer.byteLength(text);
    content = parseJson(text);
  } else {
    if (typeof content !== 'string') content = Array.isArray(content) ? content.join('') : String(content);
    size = Buffer.byteLength(content);
    if (mime === 'text/plain' && size > MAX_TEXT) {
      omit(size, 'cut to 64 KiB');
      content = cutText(content, MAX_TEXT);
      size = MAX_TEXT;
    }
  }
  if (size > MAX_VALUE) return omit(size, 'larger than 8 MiB');
  if (bundle.size + size > MAX_BUNDLE) return omit(size, 'the whole is larger than 16 MiB');
  bundle.size += size;
  bundle.data[mime] = content;
}

/** The bundle of the representations that the cell chose. */
function bundleOf(representations, metadata) {
  const bundle = { data: {}, metadata: plainData(metadata) ?? {}, omitted: [], size: 0 };
  for (const [mime, value] of Object.entries(representations)) addTo(bundle, mime, value);
  return finished(bundle);
}

function finished({ data, metadata, omitted }) {
  return omitted.length ? { data, metadata, omitted } : { data, metadata };
}

/** The bundle of any value. */
function describe(value) {
  const own = value !== null && typeof value === 'object' ? value[Symbol.for('Jupyter.display')] : undefined;
  if (typeof own === 'function') return bundleOf(own.call(value));
  const bundle = { data: {}, metadata: {}, omitted: [], size: 0 };
  const bytes = bytesOf(value);
  const image = bytes && imageType(bytes);
  if (image) {
    addTo(bundle, image, bytes);
    addTo(bundle, 'text/plain', `<${image}, ${bytes.length} bytes>`);
    return finished(bundle);
  }
  addTo(bundle, 'text/plain', inspect(value));
  if (typeof value === 'string' && value.length > MAX_TEXT) {
    bundle.omitted = [{ mime: 'text/plain', bytes: Buffer.byteLength(value), reason: 'cut to 64 KiB' }];
  }
  if (typeof value === 'object' && value !== null) {
    const data = plainData(value);
    if (data !== undefined) addTo(bundle, 'application/json', data);
  }
  return finished(bundle);
}
