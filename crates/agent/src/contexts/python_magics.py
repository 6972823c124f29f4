# The Python driver, the part about lines and cells that start with % or !: read when the first of them appears.

import builtins
import os
import sys



class MagicError(Exception):
    """A line that starts with % or ! and cannot be done."""

    __module__ = "builtins"  # which a traceback does not write out


def expand(command, frame):
    """Puts Python's variables into a command, as `{name}` or `$name`; anything else is the shell's."""
    import re

    names = {**frame.f_globals, **frame.f_locals}

    def value(match):
        expression = match[1] or match[2]
        if re.match(r"\w+", expression)[0] not in names:
            return match[0]
        try:
            return str(eval(expression, frame.f_globals, dict(frame.f_locals)))
        except Exception:
            return match[0]

    return re.sub(r"(?<![$\\])\{([A-Za-z_]\w*(?:\.\w+|\[[^\]{}]*\])*)\}|(?<!\\)\$([A-Za-z_]\w*)", value, command)


def shell():
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def run_program(name, argv, **options):
    import subprocess

    flush()
    status = subprocess.run(argv, **options).returncode
    if status:
        raise subprocess.CalledProcessError(status, name)


def magic_shell(command):
    import subprocess

    flush()
    main["_exit_code"] = subprocess.call([shell(), "-c", command])


def magic_lines(command):
    import subprocess

    flush()
    found = subprocess.run([shell(), "-c", command], stdout=subprocess.PIPE)
    main["_exit_code"] = found.returncode
    return found.stdout.decode("utf-8", "replace").splitlines()


def magic_pip(arguments, frame):
    import importlib
    import shlex
    import site

    # The whole machine is the sandbox's own: there is no system to protect from its packages.
    environment = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    run_program("%pip", [sys.executable, "-m", "pip", *shlex.split(arguments)], env=environment)
    importlib.invalidate_caches()
    user = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(user) and user not in sys.path:
        site.addsitedir(user)  # made by this very command


def magic_cd(path, frame):
    path = path.strip().strip("\"'")
    before = os.getcwd()
    os.chdir(main.get("_oldpwd", before) if path == "-" else os.path.expanduser(path or "~"))
    main["_oldpwd"] = before
    print(os.getcwd())


def magic_env(text, frame):
    name, equals, value = text.partition("=" if "=" in text else " ")
    if not text:
        return dict(os.environ)
    if not equals:
        return os.environ[name]
    os.environ[name.strip()] = value.strip()


def run_here(text, frame):
    return run_code(compile_cell(text, "<magic>"), frame.f_globals, frame.f_locals)


def timed(work):
    from time import perf_counter, process_time

    cpu, wall = process_time(), perf_counter()
    try:
        return work()
    finally:
        print("CPU time: %.3f s, wall time: %.3f s" % (process_time() - cpu, perf_counter() - wall))


def time_loops(text, names):
    import timeit

    timer = timeit.Timer(text, globals=names)
    number, _ = timer.autorange()
    times = [spent / number * 1e6 for spent in timer.repeat(3, number)]
    print("%.3f us per loop (best of 3, %d loops each)" % (min(times), number))


def magic_ls(arguments, frame):
    run_program("%ls", [shell(), "-c", "ls " + arguments])


LINE_MAGICS = {
    "cd": magic_cd,
    "env": magic_env,
    "ls": magic_ls,
    "matplotlib": lambda text, frame: None,  # figures are shown without it
    "pip": magic_pip,
    "pwd": lambda text, frame: os.getcwd(),
    "time": lambda text, frame: timed(lambda: run_here(text, frame)),
    "timeit": lambda text, frame: time_loops(text, {**frame.f_globals, **frame.f_locals}),
}


def cell_bash(arguments, body):
    if len(body) < 100_000:
        run_program("%%bash", [shell(), "-c", body])
    else:  # longer than one argument may be
        run_program("%%bash", [shell()], input=body.encode())


def cell_writefile(arguments, body):
    words = arguments.split()
    append = words[:1] in (["-a"], ["--append"])
    if len(words) != 1 + append:
        raise MagicError("%%writefile needs one path: %%writefile [-a] PATH")
    path = os.path.expanduser(words[-1])
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        file.write(body)
    print(("Appended to " if append else "Wrote ") + path)


CELL_MAGICS = {
    "bash": cell_bash,
    "sh": cell_bash,
    "time": lambda arguments, body: timed(lambda: run_code(compile_cell("\n" + body, cell_name()), main)),
    "timeit": lambda arguments, body: time_loops(body, main),
    "writefile": cell_writefile,
}


def find_magic(table, mark, text):
    name, _, rest = text.partition(" ")
    if name not in table:
        known = ", ".join(mark + known for known in sorted(table))
        raise MagicError("there is no magic %s%s; those that exist: %s" % (mark, name, known))
    return table[name], rest.strip()


def magic(mark, text):
    """What a line with a magic becomes a call of."""
    frame = sys._getframe(1)
    if mark != "%" or not text.startswith("time"):  # what is timed is Python already
        text = expand(text, frame)
    if mark == "!":
        return magic_shell(text)
    if mark == "!!":
        return magic_lines(text)
    found, rest = find_magic(LINE_MAGICS, "%", text)
    return found(rest, frame)


def rewrite_magics(code):
    """Lines that start a statement with % or ! become calls. Strings, brackets and continued lines are left alone."""
    import re

    token = re.compile(r"""#.*|[rbfuRBFU]{0,2}('''|\"\"\")|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|[()\[\]{}]""")
    start = re.compile(r"(\s*)((?:[A-Za-z_][\w.,\s\[\]'\"]*=\s*)?)(!!|!|%)(?![=%])(.*)", re.DOTALL)
    depth, quotes, continued, lines = 0, None, False, code.split("\n")
    for number, line in enumerate(lines):
        found = start.match(line) if not (depth or quotes or continued) else None
        if found:
            indent, target, mark, text = found.groups()
            last = number
            while text.endswith("\\") and last + 1 < len(lines):
                last += 1
                text = text[:-1] + lines[last].strip("\n")
                lines[last] = ""
            mark = "!!" if mark == "!" and target else mark
            lines[number] = "%s%s__magic__(%r, %r)" % (indent, target, mark, text.strip())
            continue
        at = 0
        while True:
            if quotes:
                end = re.compile(r"(?:\\.|(?!%s).)*?%s" % (quotes, quotes), re.DOTALL).match(line, at)
                if not end:
                    break
                at, quotes = end.end(), None
            piece = token.search(line, at)
            if not piece:
                break
            at, quotes = piece.end(), piece[1]
            depth += (piece[0] in "([{") - (piece[0] in ")]}") if len(piece[0]) == 1 else 0
        continued = not quotes and line.rstrip("\r").endswith("\\")
    return "\n".join(lines)


builtins.__magic__ = magic
