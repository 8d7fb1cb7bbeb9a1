"""Chat templates as models bring them, written from their formats: ChatML, Llama 3, Mistral, tools, harmony."""

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " ~ date ~ "\\n\\n" ~ system ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
        {%- endfor %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user/assistant/user/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant roles are known') }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = """{%- macro describe(tool) %}
{{ tool.function.name }}: {{ tool | tojson(indent=2) }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- describe(tool) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.first or (messages[loop.index0 - 1].role != message.role) %}
        {{- '<|im_start|>' + message.role + '\\n' }}
    {%- endif %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}{% continue %}{% endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if loop.index0 == ns.last %}{{ ' /last' }}{% endif %}
    {%- generation %}{{ '<|im_end|>' }}{% endgeneration %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HARMONY = """{#- Takes `reasoning_effort` beside messages and tools. #}
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}
        {{- (type_of(spec['items']) if spec['items'] else "any") + "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type[0] is defined -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.type == "string" and spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == "integer" -%}
        {{- "number" }}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
    {%- if spec.nullable %}
        {{- " | null" }}
    {%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
        {%- for key, spec in tool.parameters.properties.items() %}
            {{- key + ("" if key in (tool.parameters.required or []) else "?") + ": " + type_of(spec) }}
            {%- if spec.default is defined %}
                {{- ", // default: " + spec.default|tojson }}
            {%- endif %}
            {{- ",\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{%- macro system() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are a large language model." %}
    {%- endif %}
    {{- model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + system() + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer }}
    {%- if tools %}
        {{- "\\n\\n# Tools\\n\\n" + namespace_of("functions", tools) }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("channels belong in fields of their own") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(found=false) %}
            {%- for future in loop_messages[loop.index:] %}
                {%- if future.role == 'assistant' and "tool_calls" not in future %}
                    {%- set later.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking and not later.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments|tojson + "<|call|>" }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}
            {{- raise_exception("a tool's message follows a call") }}
        {%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""
