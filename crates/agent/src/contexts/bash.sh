# The loop of a Bash context. A newline on descriptor 3 announces a request in the file of descriptor 5 (fields ended by
# zero bytes); replies go to descriptor 4, each in one small write. Cells are sourced at the top level, outside of any function
# and loop: there `declare` makes global variables, `return` ends the cell, and `break` cannot reach the driver.
# The traps INT, ERR and DEBUG are the driver's and set anew for each cell. `set -e` ends the cell, not the process; but what
# ends any script at once (an unset variable under `set -u`, ${x:?}) ends the process, as `exit` does.
shopt -s expand_aliases
trap '' INT
# For what a cell does to its standard output and error by `exec`; hidden from it.
exec 6>&1 7>&2
__ctx_count=0 __ctx_errexit='' __ctx_xtrace=''

# Ends whatever is running below the driver, one function or sourced file for each command that wants to start. Only the
# driver's own level, where a request is evaluated, has no source.
__ctx_unwind='[[ -z ${BASH_SOURCE-} ]] || builtin return "$__ctx_status"'
__ctx_stop='builtin set -T; builtin trap "$__ctx_unwind" DEBUG; '$__ctx_unwind
__ctx_interrupt="__ctx_interrupted=1 __ctx_status=130; $__ctx_stop"
# Runs before errexit takes effect, which would end the process.
__ctx_failure='__ctx_failed=$?
[[ $- != *e* ]] || {
	((BASH_SUBSHELL == 0)) || builtin exit "$__ctx_failed"
	builtin set +e; __ctx_stopped=1 __ctx_status=$__ctx_failed; '"$__ctx_stop"'
}'
# Runs before the first command of a cell, when its text has been read whole.
__ctx_begin='[[ -z ${BASH_SOURCE-} ]] || {
	builtin trap - DEBUG; builtin set +T; exec 9<&-
	__ctx_begun=1; builtin set "-E${__ctx_errexit}${__ctx_xtrace}"
}'

# __ctx_json TEXT: sets REPLY to it as a JSON string, in ASCII.
__ctx_json() {
	local LC_ALL=C text=${1:0:1000}
	text=${text//[^[:print:]$'\n\t']/?}
	text=${text//\\/\\\\}
	text=${text//\"/\\\"}
	text=${text//$'\n'/\\n}
	REPLY=\"${text//$'\t'/\\t}\"
}

__ctx_send() { builtin printf '%s%s%s' "$__ctx_token" "$1" "$2" >&4; }

# __ctx_error NAME VALUE [LINE...]
__ctx_error() {
	local REPLY name value line lines=
	__ctx_json "$1" && name=$REPLY
	__ctx_json "$2" && value=$REPLY
	for line in "${@:3:3}"; do
		__ctx_json "$line" && lines+=${lines:+,}$REPLY
	done
	__ctx_send e "{\"name\":$name,\"value\":$value,\"traceback\":[$lines]}"
}

# __ctx_set NAME=VALUE: sets a variable for this cell and notes what it was.
__ctx_set() {
	local name=${1%%=*}
	[[ $name =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || return 0
	if [[ -v $name ]]; then
		local -n variable=$name
		__ctx_before+=("$name" "${variable@a}" "$variable")
	else
		__ctx_before+=("$name" unset '')
	fi
	builtin export "$1"
}

__ctx_restore() {
	local index name
	for ((index = ${#__ctx_before[@]} - 3; index >= 0; index -= 3)); do
		name=${__ctx_before[index]}
		if [[ ${__ctx_before[index + 1]} == unset ]]; then
			builtin unset -v "$name"
		else
			builtin printf -v "$name" %s "${__ctx_before[index + 2]}"
			[[ ${__ctx_before[index + 1]} == *x* ]] || builtin export -n "$name"
		fi
	done
} 2>/dev/null

# Reports how the cell ended.
__ctx_tell() {
	local state=error message
	if [[ $__ctx_interrupted ]]; then
		__ctx_error Interrupted 'the cell was interrupted'
	elif ((__ctx_status == 0)); then
		state=ok
	elif ((__ctx_status <= 2)) && [[ ! $__ctx_stopped ]] && ! message=$("$BASH" -n -O extglob <<<"$1" 2>&1); then
		builtin mapfile -t message <<<"$message"
		message=("${message[@]/#"$BASH"/bash}")
		__ctx_error SyntaxError "${message[0]#bash: }" "${message[@]}"
	else
		__ctx_error ExitStatus "$__ctx_status"
	fi
	__ctx_send f "{\"status\":\"$state\",\"count\":$__ctx_count}"
}

__ctx_hello() {
	__ctx_token=$1
	__ctx_send y "{\"version\":\"${BASH_VERSION%%(*}\"}"
}

# What has to be done before a cell, given the fields of the request.
__ctx_prepare() {
	__ctx_count=$((__ctx_count + 1)) __ctx_before=() __ctx_back=''
	__ctx_begun='' __ctx_interrupted='' __ctx_stopped='' __ctx_status=0
	local field CDPATH= from=$PWD oldpwd=${OLDPWD-}
	if [[ $3 ]]; then
		if ! builtin cd -- "$3" 2>/dev/null; then
			__ctx_error DirectoryError "$3 is not a directory that can be entered"
			__ctx_send f "{\"status\":\"error\",\"count\":$__ctx_count}"
			return 1
		fi
		__ctx_back=$from __ctx_oldpwd=$oldpwd
	fi
	for field in "${@:5}"; do __ctx_set "$field"; done
}

# What has to be done after it, first of all to be undisturbed by its options.
__ctx_after() {
	if [[ $__ctx_begun ]]; then
		[[ $- == *e* || $__ctx_stopped ]] && __ctx_errexit=e || __ctx_errexit=''
		[[ $- == *x* ]] && __ctx_xtrace=x || __ctx_xtrace=''
	fi
	builtin set +evxTE
	[[ $__ctx_interrupted || $__ctx_stopped ]] || __ctx_status=$__ctx_last
} 2>/dev/null

__ctx_finish() {
	local CDPATH=
	__ctx_restore
	[[ ! $__ctx_back ]] || { builtin cd -- "$__ctx_back" && OLDPWD=$__ctx_oldpwd; } 2>/dev/null
	__ctx_tell "$2"
}

__ctx_request='
\builtin mapfile -d "" -t __ctx_fields </dev/fd/5
if [[ ${__ctx_fields[0]} == hello ]]; then
	__ctx_hello "${__ctx_fields[1]}"
elif [[ ${__ctx_fields[0]} == execute ]] && __ctx_prepare "${__ctx_fields[@]}"; then
	\builtin set -ET
	\builtin trap "$__ctx_failure" ERR
	\builtin trap "$__ctx_begin" DEBUG
	\builtin trap "$__ctx_interrupt" INT
	\builtin source /dev/fd/9 9<<<"${__ctx_fields[1]}" 3<&- 4>&- 5<&- >&6 2>&7 6>&- 7>&- </dev/null
	{ __ctx_last=$?; \builtin trap - DEBUG ERR; \builtin trap "" INT; __ctx_after; } 2>/dev/null
	__ctx_finish "${__ctx_fields[@]}"
fi
'
# A loop of the shell would be one that a cell could break.
mapfile -t -u 3 -c 1 -C 'eval "$__ctx_request" #' __ctx_lines
