// Rewrites code so that V8 can evaluate it piece by piece: types are stripped, `import` statements become
// `await import()`, and top-level declarations become ones that a later cell may declare again in any form. Lines stay
// where they were.
const nodeModule = require('node:module');

// Parsing takes some two hundred times the code's size in memory.
const MAX_PARSED = 1024 * 1024;
// Where the image may keep what Node itself has only from version 22.13 on.
const SHARED_FOLDERS = ['/usr/local/lib/node_modules', '/usr/share/nodejs', '/usr/lib/node_modules'];
const IMPORT = '__import';
const IMPORT_META = '__importMeta';
const VALUE = '__value';

/** An error in the code of a cell, found before it ran. */
class SourceError extends Error {
  constructor(name, message, lines = []) {
    super(message);
    this.name = name;
    this.lines = lines;
  }
}

let acornParser;
/** The parser that Node carries for its own prompt. */
function acorn() {
  if (acornParser === undefined) {
    acornParser = null;
    try {
      const text = process.binding('natives')['internal/deps/acorn/acorn/dist/acorn'];
      const loaded = { exports: {} };
      new Function('exports', 'module', text)(loaded.exports, loaded);
      if (typeof loaded.exports.parse === 'function') acornParser = loaded.exports;
    } catch {
      // Cells then run as they are: a name keeps the kind of its first declaration, and imports are written `await import()`.
    }
  }
  return acornParser;
}

function parse(code) {
  // Neither kind of source fits all cells: `await` and `import` belong to modules, `with` and octal numbers to scripts.
  const options = { ecmaVersion: 'latest', allowAwaitOutsideFunction: true, allowHashBang: true };
  try {
    return acorn().parse(code, { ...options, sourceType: 'module' });
  } catch (asModule) {
    try {
      return acorn().parse(code, { ...options, sourceType: 'script' });
    } catch {
      return asModule;
    }
  }
}

const builtinNames = new Set(Object.getOwnPropertyNames(globalThis));
const kinds = new Map();

/**
 * How a name is declared, so that any later cell may do it again. As `var`, that is always possible; but a name that Node
 * itself has given to the global object may be one that cannot be assigned: such a name is shadowed by `let`.
 */
function kindFor(names, lexical) {
  const known = names.map((name) => kinds.get(name)).find(Boolean);
  const kind = known ?? (lexical && names.some((name) => builtinNames.has(name)) ? 'let' : 'var');
  for (const name of names) if (builtinNames.has(name)) kinds.set(name, kind);
  return kind;
}

function namesIn(pattern, into = []) {
  if (!pattern) return into;
  if (pattern.type === 'Identifier') into.push(pattern.name);
  else if (pattern.type === 'ObjectPattern') pattern.properties.forEach((each) => namesIn(each.value ?? each.argument, into));
  else if (pattern.type === 'ArrayPattern') pattern.elements.forEach((each) => namesIn(each, into));
  else if (pattern.type === 'AssignmentPattern') namesIn(pattern.left, into);
  else if (pattern.type === 'RestElement') namesIn(pattern.argument, into);
  return into;
}

/** Calls `visit` for each node below and including this one. */
function walk(root, visit) {
  const left = [root];
  while (left.length) {
    const node = left.pop();
    visit(node);
    for (const key in node) {
      const child = node[key];
      if (Array.isArray(child)) for (const each of child) each && typeof each.type === 'string' && left.push(each);
      else if (child && typeof child.type === 'string') left.push(child);
    }
  }
}

const nameOf = (node) => (node.type === 'Literal' ? node.raw : node.name);

function importStatement(node, code) {
  const attributes = node.attributes?.length
    ? `, { with: { ${node.attributes.map((each) => code.slice(each.start, each.end)).join(', ')} } }`
    : '';
  const loaded = `await ${IMPORT}(${node.source.raw}${attributes})`;
  const whole = node.specifiers.find((each) => each.type === 'ImportNamespaceSpecifier');
  const named = node.specifiers
    .filter((each) => each !== whole)
    .map((each) => `${each.type === 'ImportDefaultSpecifier' ? 'default' : nameOf(each.imported)}: ${each.local.name}`);
  if (!node.specifiers.length) return `${loaded};`;
  const kind = kindFor(node.specifiers.map((each) => each.local.name), true);
  const parts = [];
  if (whole) parts.push(`${whole.local.name} = ${loaded}`);
  if (named.length) parts.push(`{ ${named.join(', ')} } = ${whole ? whole.local.name : loaded}`);
  return `${kind} ${parts.join(', ')};`;
}

/** Makes the changes, given as [start, end, text]; the lines that a change swallows are put back after it. */
function edited(code, changes) {
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const parts = [];
  let at = 0;
  for (const [start, end, text] of changes) {
    if (start < at) continue;
    const lost = code.slice(start, end).split('\n').length - text.split('\n').length;
    parts.push(code.slice(at, start), text, '\n'.repeat(Math.max(0, lost)));
    at = end;
  }
  parts.push(code.slice(at));
  return parts.join('');
}

function declaration(node, code, changes) {
  if (node.type === 'VariableDeclaration' && ['const', 'let', 'var'].includes(node.kind)) {
    const kind = kindFor(node.declarations.flatMap((each) => namesIn(each.id)), node.kind !== 'var');
    if (kind === node.kind) return;
    changes.push([node.start, node.start + node.kind.length, kind.padEnd(node.kind.length)]);
    for (const each of node.declarations) {
      // `let x;` makes x undefined again, `var x;` would leave it.
      if (!each.init && node.kind === 'let') changes.push([each.end, each.end, ' = undefined']);
    }
  } else if (node.type === 'ClassDeclaration' && node.id) {
    changes.push([node.start, node.start, `${kindFor([node.id.name], true)} ${node.id.name} = `], [node.end, node.end, ';']);
  } else if (node.type === 'FunctionDeclaration' && node.id && kindFor([node.id.name], false) === 'let') {
    changes.push([node.start, node.start, `let ${node.id.name} = `], [node.end, node.end, ';']);
  }
}

function statement(node, code, changes) {
  if (node.type === 'ImportDeclaration') {
    changes.push([node.start, node.end, importStatement(node, code)]);
  } else if (node.type === 'ExportNamedDeclaration' && node.declaration) {
    changes.push([node.start, node.declaration.start, '']);
    declaration(node.declaration, code, changes);
  } else if (node.type === 'ExportDefaultDeclaration') {
    const named = /^(Class|Function)Declaration$/.test(node.declaration.type) && node.declaration.id;
    if (named) {
      changes.push([node.start, node.declaration.start, '']);
      declaration(node.declaration, code, changes);
    } else {
      changes.push([node.start, node.declaration.start, ';('], [node.declaration.end, node.end, ');']);
    }
  } else if (/^Export/.test(node.type)) {
    changes.push([node.start, node.end, node.source ? `await ${IMPORT}(${node.source.raw});` : ';']);
  } else {
    declaration(node, code, changes);
  }
}

/** The code as it is evaluated. */
function prepare(code) {
  // At the start of a statement `{` opens a block, but code that is only `{ a: 1 }` means an object.
  if (/^\s*\{/.test(code) && !/;\s*$/.test(code)) {
    const object = `(${code.trimEnd()}\n)`;
    if (code.length <= MAX_PARSED && acorn() && !(parse(object) instanceof Error)) return prepare(object);
  }
  if (code.length > MAX_PARSED || !acorn()) return code;
  const tree = parse(code);
  const withModules = /\b(import|export)\b/.test(code);
  if (tree instanceof Error) {
    // V8 explains most errors better, but to it every import is one.
    if (!/^\s*(import|export)\b(?!\s*\()/m.test(code) || !tree.loc) return code;
    throw new SourceError('SyntaxError', tree.message.replace(/ \(\d+:\d+\)$/, ''), pointer(code, tree.loc.line, tree.loc.column));
  }
  const changes = [];
  for (const node of tree.body) statement(node, code, changes);
  const last = tree.body.at(-1);
  if (last?.type === 'ExpressionStatement' && !last.directive) {
    // Taken by reference: the inspector would copy a string of any size several times.
    changes.push([last.expression.start, last.expression.start, `${VALUE}((`], [last.expression.end, last.expression.end, '))']);
  }
  if (withModules) {
    walk(tree, (node) => {
      if (node.type === 'ImportExpression') changes.push([node.start, node.start + 'import'.length, IMPORT]);
      else if (node.type === 'MetaProperty' && node.meta.name === 'import') changes.push([node.start, node.end, IMPORT_META]);
    });
  }
  return edited(code, changes);
}

/** The source line of an error, with a mark below its place; the line counts from 1 and the column from 0. */
function pointer(code, line, column) {
  const text = code.split('\n', line)[line - 1];
  if (text === undefined) return [];
  const from = Math.max(0, column - 100);
  return [`    ${text.slice(from, from + 200)}`, `    ${' '.repeat(column - from)}^`];
}

let stripper;
function typeStripper() {
  if (stripper) return stripper;
  if (nodeModule.stripTypeScriptTypes) {
    return (stripper = (code, mode) => nodeModule.stripTypeScriptTypes(code, { mode }));
  }
  for (const id of [...SHARED_FOLDERS.map((folder) => `${folder}/amaro`), 'amaro']) {
    let amaro;
    try {
      amaro = localRequire()(id);
    } catch (error) {
      if (error.code === 'MODULE_NOT_FOUND') continue;
      throw error;
    }
    return (stripper = (code, mode) => amaro.transformSync(code, { mode: mode === 'strip' ? 'strip-only' : mode }).code);
  }
  throw new SourceError('TypeScriptUnavailable', `Node ${process.versions.node} cannot read TypeScript by itself and this image has no npm ` +
    `package "amaro" (looked for in ${SHARED_FOLDERS.join(', ')} and from ${here()}): install it, or use Node 22.13 or later, or write JavaScript`);
}

/** JavaScript of TypeScript: types become blanks; only what is more than types (enums, namespaces) is translated. */
function withoutTypes(code) {
  const strip = typeStripper();
  try {
    return strip(code, 'strip');
  } catch {
    try {
      return strip(code, 'transform');
    } catch (error) {
      // Node's own stripper shows the place at the head of the stack; the package shows it below the message.
      const text = String(error?.message ?? error).trim().replace(/\s*Caused by:[^]*$/, '');
      const [first, ...rest] = text.split('\n');
      const shown = rest.length ? rest : String(error?.stack ?? '').split(/\n\n|\n\w*Error/, 1)[0].split('\n').slice(1);
      const lines = shown.filter((line) => line.trim());
      throw new SourceError('SyntaxError', first.replace(/^\s*x\s+/, ''), lines);
    }
  }
}
