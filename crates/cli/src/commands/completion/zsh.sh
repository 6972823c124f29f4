#compdef bathy
_bathy() {
    local line
    local -a whole begun
    local files=0
    while IFS= read -r line; do
        case $line in
            :files) files=1 ;;
            *[:=]$'\t'*) begun+=("${line%%$'\t'*}") ;;
            *) whole+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}") ;;
        esac
    done < <(command bathy complete "$((CURRENT - 1))" -- "${(@Q)words}" 2>/dev/null)
    (( ${#whole} )) && _describe 'bathy' whole
    (( ${#begun} )) && compadd -S '' -a begun
    (( files )) && _files
}
if [ "$funcstack[1]" = "_bathy" ]; then
    _bathy "$@"
else
    compdef _bathy bathy
fi
