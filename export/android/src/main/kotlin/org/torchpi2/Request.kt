package org.torchpi2

/** What was said in a talk. [role] is "system", "user" or "assistant". */
data class Message(val role: String, val content: String)

/** What is asked for: [prompt] or [messages]. What is null is as the model's generation_config.json has it. */
data class Request(
    /** Text to be continued. */
    val prompt: String? = null,
    /** A talk, whose last message is answered. */
    val messages: List<Message>? = null,
    /** 0: as many as there is room for. */
    val maxNewTokens: Int = 0,
    /** 0 is greedy. */
    val temperature: Double = 0.0,
    val topK: Int? = null,
    val topP: Double? = null,
    val minP: Double? = null,
    val repetitionPenalty: Double? = null,
    /** Texts before which the answer ends. */
    val stop: List<String>? = null,
    val seed: Long = 0,
) {
    /** A line of `pi2_runner --requests`. */
    internal fun json() = json(
        mapOf(
            "prompt" to prompt,
            "messages" to messages?.map { mapOf("role" to it.role, "content" to it.content) },
            "max_new_tokens" to maxNewTokens.takeIf { it != 0 },
            "temperature" to temperature,
            "top_k" to topK,
            "top_p" to topP,
            "min_p" to minP,
            "repetition_penalty" to repetitionPenalty,
            "stop" to stop,
            "seed" to seed,
        ),
    )
}

private fun json(value: Any?): String = when (value) {
    is Map<*, *> -> value.entries.joinToString(",", "{", "}") { json(it.key) + ":" + json(it.value) }
    is List<*> -> value.joinToString(",", "[", "]") { json(it) }
    is String -> value.asIterable().joinToString("", "\"", "\"", transform = ::written)
    else -> value.toString()
}

private fun written(one: Char) =
    if (one < ' ' || one in "\"\\") "\\u" + one.code.toString(16).padStart(4, '0') else one.toString()
