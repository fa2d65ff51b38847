/** What tests/export/runner/test_jvm.py has Bundle.kt do: `CallsKt WHAT FOLDER...` prints lines that it compares. */
package calls

import java.util.concurrent.CountDownLatch
import kotlin.concurrent.thread
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.catch
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.launchIn
import kotlinx.coroutines.flow.onEach
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking
import org.torchpi2.Bundle
import org.torchpi2.Message
import org.torchpi2.Request

private val PROMPTS =
    listOf("def f1(x", "    return x * 3 + y\n\ndef f2(x, y=2):\n", "é 日本 🙂", "\"\\\u0001\u2028")
private val ASKED = Request("def f1(x", maxNewTokens = 20)

fun main(arguments: Array<String>) {
    val (what, folder) = arguments
    when (what) {
        "answers" -> Bundle(folder).use(::answers)
        "pieces" -> Bundle(folder).use { pieces(it, arguments[2]) }
        "talk" -> Bundle(folder).use(::talk)
        "stops" -> Bundle(folder).use(::stops)
        "errors" -> errors(folder, arguments[2])
        "closing" -> closing(folder)
        "races" -> races(folder, arguments[2].toInt())
    }
}

private fun answers(bundle: Bundle) = PROMPTS.forEach { prompt ->
    println(bundle.generate(Request(prompt, maxNewTokens = 12)))
    println(bundle.generate(Request(prompt, null, 12, 0.9, 50, topP = 0.9, minP = 0.01, 1.5, listOf("🙂"), seed = 3)))
}

/** Line ends cannot be told from those of the text. */
private fun pieces(bundle: Bundle, prompt: String) = runBlocking {
    val request = Request(prompt, maxNewTokens = 8, temperature = 9.0, seed = 1)
    val collects = Thread.currentThread()
    var report = ""
    val pieces = bundle.stream(request) {
        check(Thread.currentThread() == collects)
        report = it
    }.toList()
    println(report)
    pieces.forEach { println(it.encodeToByteArray().joinToString(" ")) }
}

private fun talk(bundle: Bundle) = runBlocking {
    val messages = mutableListOf<Message>()
    for (said in listOf("a", "🙂")) {
        messages += Message("user", said)
        val text = bundle.chat(messages, Request(maxNewTokens = 3)) { println(it) }.toList().joinToString("")
        messages += Message("assistant", text)
    }
}

/** Each in the middle, and then the whole answer. */
private fun stops(bundle: Bundle) = runBlocking {
    var pieces = 0
    println(bundle.generate(ASKED) { if (++pieces == 3) thread { bundle.cancel() }.join() })
    println(said { bundle.generate(ASKED) { throw ArithmeticException("mine 🙂") } })
    println(said { bundle.generate(ASKED) { throw IllegalStateException("mine, too") } })
    println(bundle.stream(ASKED).take(3).toList().size)
    println(said { bundle.stream(ASKED).collect { error("the collector's") } })
    val cancels = thread(isDaemon = true) { while (!Thread.interrupted()) bundle.cancel() }
    println(generateSequence { said { bundle.generate(ASKED) } }.first { it.startsWith("CancellationException") })
    repeat(50) { bundle.stream(ASKED).collect() } // ends without an error, in the prompt, too
    cancels.interrupt()
    cancels.join()
    println(bundle.generate(ASKED))
}

private fun errors(folder: String, nowhere: String) {
    println(said { Bundle(nowhere) })
    println(said { Bundle(folder, budget = 1) })
    Bundle(folder).use { bundle ->
        println(said { Bundle(folder) })
        println(said { bundle.generate(Request()) })
        println(said { bundle.generate(Request("a", listOf(Message("user", "b")))) })
        println(said { bundle.generate(Request(messages = listOf(Message("nobody 🙂", "b")))) })
        println(said { bundle.generate(ASKED.copy(temperature = Double.NaN)) })
        println(said { bundle.generate(Request("a".repeat(1000))) })
        println(said { bundle.generate(Request("a\uD83D")) }) // half a character
        println(said { bundle.generate(ASKED) { bundle.generate(ASKED) } })
        println(said { runBlocking { bundle.stream(Request()).collect() } })
        println(bundle.generate(ASKED))
    }
}

private fun closing(folder: String) {
    var bundle = Bundle(folder)
    println(bundle.generate(ASKED) { bundle.close() })
    println(said { bundle.generate(ASKED) })
    bundle.close()
    bundle.cancel()
    bundle = Bundle(folder)
    val begun = CountDownLatch(1)
    val closes = thread {
        begun.await()
        bundle.close()
    }
    println(bundle.generate(ASKED) { if (begun.count != 0L) begun.countDown().also { Thread.sleep(200) } })
    closes.join()
    println(Bundle(folder, verify = false).use { it.generate(ASKED) })
}

/** Collecting, cancelling, asking and closing at random times; the report at the end is that of a sound bundle. */
private fun races(folder: String, rounds: Int) = repeat(rounds) { round ->
    runBlocking(Dispatchers.Default) {
        val bundle = Bundle(folder, verify = false)
        val stream = bundle.stream(ASKED).onEach { delay(0) }
            .catch { if ("found a closed one" !in it.message!!) throw it } // on a busy machine, close() may come first
        val jobs = List(3) { stream.launchIn(this) }
        val other = thread { said { bundle.generate(ASKED) { if (it.length > 1) bundle.cancel() } } }
        delay((round % 7).toLong())
        jobs.first().cancelAndJoin()
        if (round % 2 == 0) bundle.cancel()
        val answer = said { bundle.generate(ASKED) }
        thread { bundle.close() }.join()
        other.join()
        jobs.forEach { it.cancelAndJoin() }
        if (round == rounds - 1) println(answer)
    }
}

private inline fun said(body: () -> Any): String = try {
    body().toString()
} catch (error: Throwable) {
    "${error::class.java.simpleName}: ${error.message}"
}
