/*
 * The log callback a plugin gets. It is variadic, which stable Rust can call but not define; so the text is formatted
 * here and handed on as one string.
 */
#include <stdarg.h>
#include <stdio.h>

extern void pinrail_client_log_line(int level, unsigned long flags, const char *file, int line, const char *text);

void pinrail_client_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

void pinrail_client_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(text, sizeof text, format, arguments) < 0)
        text[0] = '\0';
    va_end(arguments);
    pinrail_client_log_line(level, flags, file ? file : "", line, text);
}
