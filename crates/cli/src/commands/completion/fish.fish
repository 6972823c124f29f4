function __bathy_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in (command bathy complete (math (count $words) - 1) -- $words 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c bathy -f -a '(__bathy_complete)'
